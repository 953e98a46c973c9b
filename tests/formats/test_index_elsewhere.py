"""An index whose shards are scanned by an executor of the caller's: the same bytes, counts and errors."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import pytest
from tars import archive

from bucketfeed.errors import FormatError
from bucketfeed.formats.index import build_index
from bucketfeed.store.manifest import Manifest
from bucketfeed.store.readers import open_reader

CHUNK = 4096


@pytest.fixture(params=["threads", "processes"])
def executor(request: pytest.FixtureRequest) -> Iterator[Executor]:
    if request.param == "threads":
        with ThreadPoolExecutor(2) as threads:
            yield threads
    else:
        with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as processes:
            yield processes


def tars(folder: Path, count: int = 5) -> Manifest:
    (folder / "data").mkdir()
    for shard in range(count):
        members = [(f"{shard}/{sample:03}.bin", bytes(100 * sample + shard)) for sample in range(30)]
        (folder / "data" / f"{shard}.tar").write_bytes(archive(members))
    return Manifest.from_url(str(folder / "data"), folder=folder)


def test_bytes_and_counts_are_those_of_a_build_here(tmp_path: Path, executor: Executor) -> None:
    manifest = tars(tmp_path)
    here, there = open_reader(manifest.url), open_reader(manifest.url)
    own = build_index(manifest, "tar", here, path=tmp_path / "own.idx", chunk_bytes=CHUNK)
    other = build_index(manifest, "tar", there, path=tmp_path / "other.idx", chunk_bytes=CHUNK, executor=executor)
    assert other.path.read_bytes() == own.path.read_bytes()
    assert len(other) == 150
    assert there.counter.counts().bytes_fetched == here.counter.counts().bytes_fetched
    assert executor.submit(int, "7").result(timeout=30) == 7  # it is left running


def test_a_bad_shard_is_named_and_the_good_ones_are_kept(tmp_path: Path, executor: Executor) -> None:
    manifest = tars(tmp_path)
    bad = tmp_path / "data" / "4.tar"
    whole, times = bad.read_bytes(), bad.stat()
    bad.write_bytes(b"\xff" * len(whole))
    manifest = Manifest.from_url(str(tmp_path / "data"), folder=tmp_path)
    with pytest.raises(FormatError, match=r"4\.tar"):
        build_index(manifest, "tar", open_reader(manifest.url), folder=tmp_path, executor=executor)
    assert times.st_size == bad.stat().st_size
    [parts] = tmp_path.glob("*.parts")
    assert parts.stat().st_size > 0
