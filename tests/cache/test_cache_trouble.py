"""Files that leak, run out or vanish, and fetches that must not wait for each other."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import shutil
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from objects import Source, an_extent, body, cache_files, disk_usage, temporary_files

from bucketfeed.cache.disk import DiskCache
from bucketfeed.cache.filesystem import EXTENT_BYTES, NodeCacheFileSystem
from bucketfeed.cache.reader import CachedReader
from bucketfeed.store.ranges import Buffer, Range


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@contextlib.contextmanager
def at_most(amount: int, of: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(of)
    resource.setrlimit(of, (amount, hard))
    try:
        yield
    finally:
        resource.setrlimit(of, (soft, hard))


def test_no_use_leaves_a_file_open(tmp_path: Path):
    cache = DiskCache(tmp_path / "cache", "1MiB")
    reader = CachedReader(Source(tmp_path / "log"), cache)

    def fail(ranges: list[Range]) -> list[Buffer]:
        raise ValueError("no luck")

    reader.read([an_extent("first")])
    before = open_files()
    for number in range(60):
        reader.read([an_extent(number % 20), an_extent(number % 7)])
        for extent in reader.open_all([an_extent(n) for n in range(number % 20)]):
            extent.close()
        with pytest.raises(ValueError, match="no luck"):
            cache.fetch([an_extent(number % 20), an_extent("never")], fail)
        with pytest.raises(OSError, match="bytes, not 5"):
            cache.put(an_extent("wrong"), b"short")
    cache.verify()
    cache.clear()
    assert open_files() == before


def test_a_process_that_may_open_no_more_files_reads_on(cache: DiskCache, caplog: pytest.LogCaptureFixture):
    extents = {extent: body(extent) for extent in map(an_extent, range(60))}
    with at_most(open_files() + 20, resource.RLIMIT_NOFILE):
        held = cache.fetch(list(extents), lambda ranges: [extents[range] for range in ranges])
        assert all(extent.read(0, extent.range.stop) == extents[extent.range] for extent in held)
        for extent in held:
            extent.close()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert disk_usage(cache.folder) <= cache.stats().bytes_used
    assert temporary_files(cache) == []  # after that scan


def test_c007_a_process_that_may_write_no_large_files_reads_on(cache: DiskCache, caplog: pytest.LogCaptureFixture):
    extent = an_extent("a")
    with (
        at_most(50_000, resource.RLIMIT_FSIZE),
        cache.get_or_fetch(extent, lambda: body(extent)) as found,
    ):
        assert found.read(0, extent.stop) == body(extent)
    assert "File too large" in caplog.text
    assert (cache_files(cache), temporary_files(cache)) == ([], [])


@pytest.fixture
def in_memory() -> str:
    path = f"/{uuid.uuid4().hex}/a.bin"
    fsspec.filesystem("memory").pipe_file(path, random.Random(0).randbytes(6 * EXTENT_BYTES))
    return path


def test_the_parts_that_lack_are_fetched_at_the_same_time(tmp_path: Path, in_memory: str):
    files = NodeCacheFileSystem("memory", folder=tmp_path / "cache", limit="64MiB")
    inner = files._reader.inner
    fetch, all_at_once = inner._fetch, threading.Barrier(3)

    def fetch_together(range: Range) -> Buffer:
        all_at_once.wait(30)
        return fetch(range)

    inner._fetch = fetch_together
    places = [0, 2 * EXTENT_BYTES, 4 * EXTENT_BYTES]  # apart, so that no request serves two
    got = files.cat_ranges([in_memory] * 3, places, [place + 10 for place in places], on_error="raise")
    whole = fsspec.filesystem("memory").cat_file(in_memory)
    assert got == [whole[place : place + 10] for place in places]


def test_a_folder_removed_under_an_open_file_is_read_around(tmp_path: Path, in_memory: str):
    files = NodeCacheFileSystem("memory", folder=tmp_path / "cache", limit="64MiB")
    whole = fsspec.filesystem("memory").cat_file(in_memory)
    with files.open(in_memory) as file:
        assert file.read(100) == whole[:100]
        shutil.rmtree(tmp_path / "cache")
        assert file.read() == whole[100:]


@pytest.mark.parametrize("replaced", [False, True])
def test_a_folder_that_was_removed_counts_as_empty_and_fills_again(tmp_path: Path, replaced: bool):
    cache = DiskCache(tmp_path / "runs" / "cache", "64MiB")
    extent = an_extent("a")
    assert cache.put(extent, body(extent))
    shutil.rmtree(tmp_path / "runs")
    if replaced:
        (tmp_path / "runs").write_text("a file")
    stats = cache.stats()
    assert (stats.files, stats.bytes_used, stats.limit_bytes) == (0, 0, 64 << 20)
    assert stats.free_bytes > 0
    assert cache.verify() == 0
    cache.clear()
    if not replaced:
        assert cache.put(extent, body(extent))
        assert cache.stats().files == 1
