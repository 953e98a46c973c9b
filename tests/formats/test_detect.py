"""Which format the names of objects tell."""

from __future__ import annotations

from pathlib import Path

import pytest

from bucketfeed.errors import FormatError
from bucketfeed.formats import raw
from bucketfeed.formats.detect import detect
from bucketfeed.store.manifest import Manifest

ROOT = "s3://bucket/p/"


def manifest(folder: Path, *keys: str) -> Manifest:
    return Manifest.from_objects(ROOT, [(ROOT + key, 1, "e") for key in keys], folder=folder)


@pytest.mark.parametrize(
    ("keys", "format"),
    [
        (["a.jpg", "b/c.png"], "raw"),
        (["a.json", "b.txt"], "raw"),
        (["a"], "raw"),
        (["a.tar", "b/c.TAR"], "tar"),
        (["a.tar", "a.idx", "stats.json", "README.md", "_SUCCESS", ".hidden"], "tar"),
    ],
)
def test_names_tell_the_format(tmp_path: Path, keys: list[str], format: str) -> None:
    assert detect(manifest(tmp_path, *keys)) == format


def test_tars_next_to_other_data_need_a_word(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"1 tars \(first 'a.tar'\) and 2 other .* \(first 'b.jpg'\); pass format="):
        detect(manifest(tmp_path, "a.tar", "b.jpg", "c.jpg"))


@pytest.mark.parametrize("name", ["a.tar.gz", "a.tgz"])
def test_compressed_tars_are_refused_with_a_way_out(tmp_path: Path, name: str) -> None:
    with pytest.raises(FormatError, match=f"1 compressed tars, the first is '{name}'.* pass format='raw'"):
        detect(manifest(tmp_path, name))


@pytest.mark.parametrize(
    ("key", "sample_key", "field"),
    [
        ("dogs/rex.JPG", "dogs/rex", "jpg"),
        ("v1.0/a b.tar.gz", "v1.0/a b.tar", "gz"),
        ("v1.0/plain", "v1.0/plain", "bin"),
        ("pic #1?.png", "pic #1?", "png"),
        (".hidden", ".hidden", "bin"),
        ("ends.", "ends", "bin"),
    ],
)
def test_a_raw_object_is_one_field_named_by_its_extension(key: str, sample_key: str, field: str) -> None:
    assert raw.sample(memoryview(b"x"), key) == {"__key__": sample_key, field: b"x"}
