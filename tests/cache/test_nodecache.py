from __future__ import annotations

import multiprocessing
import pickle
import random
import tarfile
import uuid
from pathlib import Path
from typing import Any

import fsspec
import pandas as pd
import pyarrow.parquet
import pytest
from objects import cache_files
from PIL import Image

from bucketfeed.cache.filesystem import EXTENT_BYTES, NodeCacheFileSystem
from bucketfeed.errors import ConfigError, ObjectChangedError
from bucketfeed.testing.gcs import GcsBucket
from bucketfeed.testing.moto import MotoBucket

DATA = random.Random(0).randbytes(2 * EXTENT_BYTES + 1000)


class Place:
    """A URL to write to and read from, by which file system, with which options."""

    def __init__(self, url: str, target_options: dict[str, Any], cache_folder: Path) -> None:
        self.url = url
        self.protocol = url.partition(":")[0]
        self.target_options = target_options
        self.options: dict[str, Any] = {
            "nodecache": {"folder": str(cache_folder), "limit": "64MiB", "skip_instance_cache": True},
            self.protocol: target_options,
        }

    def put(self, name: str, data: bytes) -> str:
        with fsspec.open(f"{self.url}{name}", "wb", **self.target_options) as file:
            file.write(data)
        return f"nodecache::{self.url}{name}"

    def open(self, name: str) -> tuple[NodeCacheFileSystem, str]:
        return fsspec.url_to_fs(f"nodecache::{self.url}{name}", **self.options)  # type: ignore[no-any-return]


@pytest.fixture(params=["file", "memory", "moto_bucket", "gcs_bucket"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    options: dict[str, Any] = {}
    if request.param == "file":
        url = f"file://{tmp_path}/data/"
        (tmp_path / "data").mkdir()
    elif request.param == "memory":
        url = f"memory://{uuid.uuid4().hex}/"
    else:
        bucket: MotoBucket | GcsBucket = request.getfixturevalue(request.param)
        url, options = bucket.url, bucket.storage_options
    return Place(url, options, tmp_path / "cache")


def test_any_part_is_right_cold_and_warm_and_comes_once_in_extents_of_the_grid(place: Place):
    place.put("a.bin", DATA)
    dice = random.Random(1)
    cold, path = place.open("a.bin")
    assert cold.cat_file(path, 5, 9) == DATA[5:9]
    assert cold.counter.counts().bytes_fetched == EXTENT_BYTES
    for _ in range(30):
        start, stop = sorted(dice.choices(range(len(DATA) + 5), k=2))
        assert cold.cat_file(path, start, stop) == DATA[start:stop]
    assert cold.cat_file(path) == DATA
    assert cold.counter.counts().bytes_fetched == len(DATA)
    warm, path = place.open("a.bin")
    assert warm.cat_file(path) == DATA
    assert warm.cat_file(path, -7) == DATA[-7:]
    assert warm.cat_file(path, 3, -len(DATA) + 9) == DATA[3:9]
    assert warm.cat_file(path, 10, 5) == warm.cat_file(path, len(DATA)) == b""
    assert warm.counter.counts().bytes_fetched == 0


def test_an_open_file_reads_seeks_and_tells_as_files_do(place: Place):
    url = place.put("a.bin", DATA)
    with fsspec.open(url, **place.options) as file:
        assert file.read(3) == DATA[:3]
        file.seek(-5, 2)
        assert (file.tell(), file.read(), file.read()) == (len(DATA) - 5, DATA[-5:], b"")
        file.seek(EXTENT_BYTES - 2)
        assert file.read(4) == DATA[EXTENT_BYTES - 2 : EXTENT_BYTES + 2]
        target = bytearray(10)
        assert file.readinto(target) == 10
        assert target == DATA[EXTENT_BYTES + 2 : EXTENT_BYTES + 12]
        copy = pickle.loads(pickle.dumps(file))
        assert copy.tell() == file.tell()
        assert copy.read(100) == file.read(100)
        assert (file.size, file.readable(), file.writable(), file.seekable()) == (len(DATA), True, False, True)


def test_empty_files_and_lines_of_text(place: Place):
    with fsspec.open(place.put("empty", b""), **place.options) as file:
        assert file.read() == b""
    text = "".join(f"line {n} ü\n" for n in range(5000))
    with fsspec.open(place.put("t.txt", text.encode()), "rt", encoding="utf-8", **place.options) as file:
        assert file.readlines() == text.splitlines(keepends=True)


def test_many_ranges_of_many_files_are_one_fetch_and_errors_stay_in_their_places(place: Place):
    place.put("a.bin", DATA)
    place.put("b.bin", DATA[::-1])
    files, a = place.open("a.bin")
    b = a.replace("a.bin", "b.bin")
    got = files.cat_ranges([a, b, a, a], [0, 10, None, EXTENT_BYTES - 1], [4, 14, 2, EXTENT_BYTES + 1])
    assert got == [DATA[:4], DATA[::-1][10:14], DATA[:2], DATA[EXTENT_BYTES - 1 : EXTENT_BYTES + 1]]
    first, second = files.cat_ranges([a, a + ".gone"], 0, 4)
    assert first == DATA[:4]
    assert isinstance(second, FileNotFoundError)
    with pytest.raises(FileNotFoundError):
        files.cat_ranges([a, a + ".gone"], 0, 4, on_error="raise")
    assert files.cat([a, b]) == {a: DATA, b: DATA[::-1]}


def test_c004_a_file_replaced_at_the_same_length_is_new_when_opened_anew_and_an_error_while_open(place: Place):
    url = place.put("a.bin", b"1" * 100)
    files, path = place.open("a.bin")
    assert files.cat_file(path) == b"1" * 100
    with files.open(path, cache_type="none") as old:
        cached = old.read(10)
        files.cache.clear()
        place.put("a.bin", b"2" * 100)
        assert cached == b"1" * 10
        with pytest.raises(ObjectChangedError):
            old.read(10)
    assert files.cat_file(path) == b"2" * 100
    with fsspec.open(url, **place.options) as file:
        assert file.read() == b"2" * 100


def test_listing_and_information_are_those_of_the_other_file_system(place: Place):
    place.put("x/a.bin", b"12345") if place.protocol != "file" else None
    if place.protocol == "file":
        folder = Path(place.url.removeprefix("file://")) / "x"
        folder.mkdir()
        (folder / "a.bin").write_bytes(b"12345")
    files, path = place.open("x/a.bin")
    folder_path = path.removesuffix("/a.bin")
    assert files.ls(folder_path, detail=False) == [path]
    assert files.find(folder_path) == files.glob(f"{folder_path}/*.bin") == [path]
    assert (files.info(path)["size"], files.size(path)) == (5, 5)
    assert (files.exists(path), files.exists(path + "x")) == (True, False)
    assert (files.isfile(path), files.isdir(path), files.isdir(folder_path)) == (True, False, True)
    assert files.ukey(path) == files.ukey(path)
    with pytest.raises(FileNotFoundError):
        files.open(path + "x")


def test_pandas_and_pyarrow_read_tables_through_it(place: Place):
    table = pd.DataFrame({"n": range(50_000), "s": [f"row {n}" for n in range(50_000)]})
    local = Path(place.options["nodecache"]["folder"]).parent / "t.parquet"
    table.to_parquet(local, row_group_size=10_000)
    parquet = place.put("t.parquet", local.read_bytes())
    csv = place.put("t.csv.gz", table.head(1000).to_csv(index=False).encode())
    for _ in range(2):
        assert pd.read_parquet(parquet, storage_options=place.options).equals(table)
        assert pd.read_csv(csv, storage_options=place.options, compression=None).equals(table.head(1000))
    files, path = place.open("t.parquet")
    column = pyarrow.parquet.read_table(path, filesystem=files, columns=["n"]).column("n").to_pylist()
    assert column == list(range(50_000))
    assert files.counter.counts().bytes_fetched == 0


def test_pictures_and_archives_open_through_it(place: Place, tmp_path: Path):
    Image.new("RGB", (30, 20), (1, 2, 3)).save(tmp_path / "p.png")
    with tarfile.open(tmp_path / "t.tar", "w") as tar:
        tar.add(tmp_path / "p.png", "in.png")
    with fsspec.open(place.put("p.png", (tmp_path / "p.png").read_bytes()), **place.options) as file:
        assert Image.open(file).getpixel((29, 19)) == (1, 2, 3)
    with (
        fsspec.open(place.put("t.tar", (tmp_path / "t.tar").read_bytes()), **place.options) as file,
        tarfile.open(fileobj=file) as tar,
    ):
        assert tar.getnames() == ["in.png"]


def test_it_is_small_when_pickled_and_reads_the_same(place: Place):
    place.put("a.bin", DATA)
    files, path = place.open("a.bin")
    files.cat_file(path, 0, 10)
    state = pickle.dumps(files)
    assert len(state) < 2000
    assert pickle.loads(state).cat_file(path, 0, 10) == DATA[:10]


def test_used_before_a_start_of_processes_they_read_too(place: Place):
    place.put("a.bin", DATA)
    files, path = place.open("a.bin")
    files.cat_file(path, 0, 10)
    starts = range(0, len(DATA), EXTENT_BYTES)
    for method in ("fork",) if place.protocol == "memory" else ("fork", "spawn"):  # memory:// is one process's own
        with multiprocessing.get_context(method).Pool(2) as pool:
            parts = pool.starmap_async(files.cat_file, [(path, n, n + 5) for n in starts])
            assert parts.get(60) == [DATA[n : n + 5] for n in starts]


def test_it_only_reads(place: Place):
    place.put("a.bin", DATA)
    files, path = place.open("a.bin")
    with pytest.raises(ConfigError, match="without 'nodecache::'"):
        files.open(path, "wb")
    with pytest.raises(ConfigError, match="only reads"):
        files.pipe_file(path, b"x")
    assert files.cat_file(path, 0, 3) == DATA[:3]


def test_a_file_system_object_may_stand_behind_it(moto_bucket: MotoBucket, tmp_path: Path):
    moto_bucket.put("a#b?c.bin", b"odd")
    s3 = fsspec.filesystem("s3", **moto_bucket.storage_options)
    files = NodeCacheFileSystem(fs=s3, folder=tmp_path / "cache", limit="10MB")
    path = moto_bucket.url.removeprefix("s3://") + "a#b?c.bin"
    assert files.cat_file(path) == files.cat_file(f"s3://{path}") == b"odd"
    assert len(cache_files(files.cache)) == 1


def test_files_in_an_archive_are_read_without_the_cache(place: Place, tmp_path: Path):
    import zipfile

    with zipfile.ZipFile(tmp_path / "z.zip", "w") as archive:
        archive.writestr("in.txt", "text")
    place.put("z.zip", (tmp_path / "z.zip").read_bytes())
    with fsspec.open(f"nodecache::zip://in.txt::{place.url}z.zip", **place.options) as file:
        assert file.read() == b"text"


def test_the_file_system_behind_it_is_needed(tmp_path: Path):
    with pytest.raises(ConfigError, match="nodecache::s3"):
        fsspec.filesystem("nodecache", folder=str(tmp_path))
