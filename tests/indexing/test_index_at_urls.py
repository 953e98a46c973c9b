"""Indexes that are kept at URLs: saved, loaded, opened with, and brought up to date."""

from __future__ import annotations

import gzip
import io
import logging
import os
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

import bucketfeed as bf
from bucketfeed.errors import CacheError, ConfigError, ObjectChangedError
from bucketfeed.formats.format import Format
from bucketfeed.store.ranges import RangeReader
from bucketfeed.testing.readers import RecordingReader


def lines(count: int, first: int = 0) -> bytes:
    return b"".join(b'{"n": %d}\n' % n for n in range(first, first + count))


def fill(folder: Path, shards: int = 4) -> Path:
    folder.mkdir(exist_ok=True)
    for shard in range(shards):
        (folder / f"{shard}.jsonl").write_bytes(lines(10, 10 * shard))
    return folder


def build(folder: Path, kept: Path, **options: Any) -> tuple[bf.Index, set[str]]:
    """Return the index of `folder`, and the names of the shards that were read for it."""
    manifest = bf.Manifest.from_url(folder, folder=kept)
    reader = RecordingReader(bf.open_reader(folder))
    index = bf.build_index(manifest, reader=reader, folder=kept, **options)
    return index, {range.url.rsplit("/", 1)[1] for call in reader.calls for range in call}


def numbers(index: bf.Index, reader: RangeReader) -> list[int]:
    return [index.sample(i, reader.read([index.range(i)])[0])["n"] for i in range(len(index))]


@pytest.mark.parametrize("where", ["file", "memory"])
def test_a_saved_index_is_loaded_with_its_manifest_and_needs_no_listing(tmp_path: Path, where: str) -> None:
    url = {"file": f"{tmp_path}/kept/deep/lines.index", "memory": f"memory://{tmp_path.name}/lines.index"}[where]
    folder = fill(tmp_path / "d")
    bf.build_index(folder, "jsonl", progress=False).save(url)
    assert not bf.Index.load(url).changes()
    (folder / "new.jsonl").write_bytes(lines(5))
    index = bf.Index.load(url)
    assert (len(index), len(index.manifest), index.format) == (40, 4, "jsonl")
    assert str(index.changes()) == "4 objects unchanged, 1 added (first 'new.jsonl')"
    dataset = bf.open_dataset(folder, index=index, cache=None)
    assert [sample["n"] for sample in dataset] == list(range(40))
    (folder / "2.jsonl").write_bytes(lines(10, 90))
    with pytest.raises(ObjectChangedError, match=r"2\.jsonl"):
        dataset[25]


def test_a_bucket_keeps_an_index_of_data_that_lies_there(bucket: Any, tmp_path: Path) -> None:
    bucket.put("d/0.csv", b"a;b\n1;x\n2;y\n")
    options = bucket.storage_options
    url, place = f"{bucket.url}d/", f"{bucket.url}kept/lines#1.index"
    format = bf.Csv(delimiter=";", dtypes={"a": "int64"})
    dataset = bf.open_dataset(url, format=format, index=place, storage_options=options, cache=None)
    index = bf.Index.load(place, storage_options=options, folder=tmp_path)
    assert [dict(sample, __key__=0) for sample in dataset] == [
        {"__key__": 0, "a": n, "b": b} for n, b in ((1, "x"), (2, "y"))
    ]
    again = bf.open_dataset(url, index=index, storage_options=options, cache=None)
    assert list(again) == list(dataset)
    assert {path.suffix for path in tmp_path.iterdir()} == {".idx", ".manifest"}


def test_a_url_takes_the_first_index_and_gives_it_to_all_others(tmp_path: Path) -> None:
    url = f"memory://{tmp_path.name}/shared.index"
    folder = fill(tmp_path / "d")
    _, read = build(folder, tmp_path / "node0", path=url)
    assert read == {"0.jsonl", "1.jsonl", "2.jsonl", "3.jsonl"}
    for node in ("node1", "node0"):
        index, read = build(folder, tmp_path / node, path=url)
        assert (len(index), read) == (40, set())
    assert sorted(path.suffix for path in (tmp_path / "node1").iterdir()) == [".idx", ".manifest"]


@pytest.mark.parametrize("place", ["url", "path", "folder"])
def test_only_shards_that_changed_are_read_again(tmp_path: Path, place: str, caplog: pytest.LogCaptureFixture) -> None:
    path = {"url": f"memory://{tmp_path.name}/x.index", "path": tmp_path / "x.index", "folder": None}[place]
    folder = fill(tmp_path / "d", 6)
    build(folder, tmp_path / "node0", path=path)
    (folder / "1.jsonl").write_bytes(lines(3, 100))
    (folder / "0-added.jsonl").write_bytes(lines(2, 200))
    (folder / "4.jsonl").unlink()
    caplog.set_level(logging.INFO if place == "folder" else logging.WARNING, "bucketfeed")
    index, read = build(folder, tmp_path / ("node1" if place == "url" else "node0"), path=path)
    assert read == {"1.jsonl", "0-added.jsonl"}
    fresh = bf.build_index(folder, progress=False)
    reader = bf.open_reader(folder)
    assert numbers(index, reader) == numbers(fresh, reader)
    assert index.fingerprint == fresh.fingerprint
    assert index.path is not None
    assert fresh.path is not None
    assert index.path.read_bytes() == fresh.path.read_bytes()
    assert (
        "4 objects unchanged, 1 changed (first '1.jsonl'), 1 added (first '0-added.jsonl'), 1 removed (first '4.jsonl')"
        in caplog.text
    )
    if place == "url":
        assert len(bf.Index.load(str(path))) == len(index)


def test_of_an_interrupted_update_what_was_done_is_kept_too(tmp_path: Path) -> None:
    folder = fill(tmp_path / "d", 3)
    build(folder, tmp_path / "kept")
    (folder / "1.jsonl").write_bytes(lines(4))
    (folder / "2.jsonl").write_bytes("{}".encode("utf-16"))
    for _ in range(2):
        with pytest.raises(bf.errors.FormatError, match=r"2\.jsonl"):
            build(folder, tmp_path / "kept")
    (parts,) = (tmp_path / "kept").glob("*.parts")
    assert parts.stat().st_size < 200  # nothing of the shards that another file holds


def test_a_shard_that_only_moved_its_date_is_read_again_and_gives_the_same(tmp_path: Path) -> None:
    folder = fill(tmp_path / "d", 3)
    first, _ = build(folder, tmp_path / "kept")
    os.utime(folder / "0.jsonl", ns=(1, 1))
    again, read = build(folder, tmp_path / "kept")
    assert read == {"0.jsonl"}
    assert again.fingerprint == first.fingerprint


def test_tars_and_compressed_lines_are_brought_up_to_date_as_well(tmp_path: Path) -> None:
    def tar(count: int) -> bytes:
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w") as archive:
            for n in range(count):
                member = tarfile.TarInfo(f"{n}.bin")
                member.size = 3
                archive.addfile(member, io.BytesIO(b"abc"))
        return out.getvalue()

    for kind, made in (("tar", tar), ("jsonl.gz", lambda count: gzip.compress(lines(count)))):
        folder, kept = tmp_path / kind, tmp_path / f"{kind}-kept"
        folder.mkdir()
        for n in range(3):
            (folder / f"{n}.{kind}").write_bytes(made(5))
        build(folder, kept)
        (folder / f"1.{kind}").write_bytes(made(7))
        index, read = build(folder, kept)
        assert (len(index), read) == (17, {f"1.{kind}"})


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("text", "jsonl"),
        (bf.Csv(delimiter=";", header=False, columns=("a",)), bf.Csv(delimiter=",", header=False, columns=("a",))),
        (bf.Csv(header=True), bf.Csv(header=False, columns=("a",))),
    ],
)
def test_an_index_of_other_options_is_no_help(tmp_path: Path, before: str | Format, after: str | Format) -> None:
    folder = fill(tmp_path / "d", 2)
    build(folder, tmp_path / "kept", format=before)
    _, read = build(folder, tmp_path / "kept", format=after)
    assert read == {"0.jsonl", "1.jsonl"}


def test_a_new_header_is_looked_for_in_every_shard(tmp_path: Path) -> None:
    folder = tmp_path / "d"
    folder.mkdir()
    for n in range(3):
        (folder / f"{n}.csv").write_bytes(b"a,b\n1,2\n")
    build(folder, tmp_path / "kept")
    (folder / "0.csv").write_bytes(b"a,c\n1,2\n")
    with pytest.raises(bf.errors.FormatError, match=r"has the columns a, b, but others before it a, c"):
        build(folder, tmp_path / "kept")


def test_objects_of_one_sample_each_are_saved_as_their_listing(tmp_path: Path) -> None:
    folder = tmp_path / "d"
    folder.mkdir()
    for n in range(3):
        (folder / f"{n}.bin").write_bytes(bytes(n))
    bf.build_index(folder).save(tmp_path / "raw.index")
    index = bf.Index.load(tmp_path / "raw.index", folder=tmp_path / "kept")
    assert (len(index), index.path, index.range(2).stop) == (3, None, 2)


def test_what_can_not_be_loaded_or_replaced_is_named(tmp_path: Path) -> None:
    url = f"memory://{tmp_path.name}/thesis.txt"
    with pytest.raises(CacheError, match=r"no index at memory://.*thesis\.txt"):
        bf.Index.load(url)
    fsspec.filesystem("memory").pipe_file(url, b"my thesis, the only copy")
    for call in (lambda: bf.Index.load(url), lambda: build(fill(tmp_path / "d"), tmp_path / "kept", path=url)):
        with pytest.raises(ConfigError, match=r"thesis\.txt' is no index, it starts with b'my thesis"):
            call()
    assert fsspec.filesystem("memory").cat_file(url) == b"my thesis, the only copy"


def test_an_index_of_an_older_version_at_a_url_is_replaced(tmp_path: Path) -> None:
    url = f"memory://{tmp_path.name}/old.index"
    fsspec.filesystem("memory").pipe_file(url, b"bucketfeed idx 1" + bytes(80))
    index, _ = build(fill(tmp_path / "d"), tmp_path / "kept", path=url)
    assert len(bf.Index.load(url)) == len(index) == 40


def test_where_nothing_may_be_put_training_goes_on_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Refusing(fsspec.implementations.memory.MemoryFileSystem):  # type: ignore[misc]
        protocol = "refusing"

        def _open(self, path: str, mode: str = "rb", **more: object) -> object:
            if "r" not in mode:
                raise PermissionError("read only")
            return super()._open(path, mode, **more)

    fsspec.register_implementation("refusing", Refusing, clobber=True)
    index, _ = build(fill(tmp_path / "d"), tmp_path / "kept", path="refusing://x.index")
    assert len(index) == 40
    assert "refusing://x.index is not allowed: PermissionError: read only" in caplog.text
    with pytest.raises(bf.errors.AccessError, match="is not allowed"):
        index.save("refusing://x.index")


def test_arrays_have_no_index_to_save(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    np.save(tmp_path / "d" / "x.npy", np.zeros((3, 2)))
    with pytest.raises(ConfigError, match="reads headers only"):
        bf.build_index(tmp_path / "d").save(tmp_path / "x.index")


def test_an_executor_gets_the_changed_shards_only_and_a_url_is_enough(tmp_path: Path) -> None:
    folder, url = fill(tmp_path / "d", 5), f"memory://{tmp_path.name}/by-threads.index"
    submitted: list[str] = []

    class Noting(ThreadPoolExecutor):
        def submit(self, fn: Any, /, *args: Any, **more: Any) -> Any:
            submitted.append(args[1].url.rsplit("/", 1)[1])
            return super().submit(fn, *args, **more)

    with Noting(2) as executor:
        bf.build_index(folder, path=url, executor=executor, progress=False)
        assert sorted(submitted) == [f"{n}.jsonl" for n in range(5)]
        submitted.clear()
        (folder / "3.jsonl").write_bytes(lines(2))
        index = bf.build_index(folder, path=url, executor=executor, progress=False)
    assert submitted == ["3.jsonl"]
    assert len(index) == len(bf.Index.load(url)) == 42
