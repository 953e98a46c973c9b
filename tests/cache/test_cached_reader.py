from __future__ import annotations

import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import pytest
from objects import Source, an_extent, body, cache_files
from reader_contract import Place, ReaderContract

import bucketfeed as bf
from bucketfeed.cache.disk import DiskCache
from bucketfeed.cache.extent import Extent, MemoryExtent
from bucketfeed.cache.reader import CachedReader, open_extent
from bucketfeed.store.local import LocalExtent, LocalReader, file_version
from bucketfeed.store.ranges import Range
from bucketfeed.testing.readers import MemoryReader, RecordingReader


class TestCachedReaderOnMemory(ReaderContract):
    @pytest.fixture
    def place(self, cache: DiskCache) -> Place:
        inner = MemoryReader({})

        def put(key: str, data: bytes) -> tuple[str, str]:
            inner.objects[f"memory://{key}"] = data, uuid.uuid4().hex
            return f"memory://{key}", inner.objects[f"memory://{key}"][1]

        return Place(CachedReader(inner, cache), put)


class TestCachedReaderWithoutRoom(TestCachedReaderOnMemory):
    @pytest.fixture
    def cache(self, tmp_path: Path) -> DiskCache:
        return DiskCache(tmp_path / "cache", 1)


class TestCachedReaderOnBuckets(ReaderContract):
    @pytest.fixture
    def place(self, bucket, cache: DiskCache) -> Place:
        inner = bf.open_reader(bucket.url, bucket.storage_options)
        return Place(CachedReader(inner, cache), lambda key, data: (bucket.url + key, bucket.put(key, data)))


@pytest.fixture
def source(tmp_path: Path) -> Source:
    return Source(tmp_path / "log")


def test_warm_reads_ask_the_store_for_nothing(source: Source, cache: DiskCache):
    ranges = [an_extent(number, 1000 + number) for number in range(300)]
    cold = CachedReader(source, cache)
    assert cold.read(ranges) == [body(range) for range in ranges]
    assert (cold.counter.counts().cache_hits, cold.counter.counts().cache_misses) == (0, 300)
    warm = CachedReader(Source(source.log), DiskCache(cache.folder, "64MiB"))
    assert warm.read(ranges) == [body(range) for range in ranges]
    counts = warm.counter.counts()
    assert (counts.cache_hits, counts.cache_misses, counts.requests) == (300, 0, 0)
    assert len(source.fetched) == 300


def test_the_misses_of_a_call_are_one_call_and_repeats_come_once(cache: DiskCache):
    ranges = [an_extent(name, 100) for name in "abcd"]
    inner = RecordingReader(MemoryReader({r.url: (body(r), "v1") for r in ranges}))
    reader = CachedReader(inner, cache)
    reader.read(ranges[:1])
    asked = [ranges[1], ranges[0], ranges[2], ranges[1], ranges[3]]
    assert reader.read(asked) == [body(range) for range in asked]
    assert inner.calls == [ranges[:1], ranges[1:]]


def test_a_larger_range_that_is_here_serves_its_parts(source: Source, cache: DiskCache):
    large = an_extent("a")
    part, other = large._replace(start=500, stop=700), an_extent("b", 10)
    reader = CachedReader(source, cache)
    assert reader.read([part, other], within=[large, None]) == [body(part), body(other)]
    assert source.fetched == [part.url, other.url]  # the part alone: the larger one was not asked for
    reader.open(large).close()
    tail = large._replace(start=99_000)
    assert reader.read([tail], within=[large]) == [body(tail)]
    assert len(source.fetched) == 3


def test_a_file_that_fails_under_a_hit_is_fetched_again(
    source: Source, cache: DiskCache, monkeypatch: pytest.MonkeyPatch
):
    extent = an_extent("a")
    reader = CachedReader(source, cache)
    reader.read([extent])

    def fail(self: Extent, start: int, stop: int) -> bytes:
        monkeypatch.undo()
        cache_files(cache)[0].unlink()
        raise bf.errors.CacheError("the disk fails")

    monkeypatch.setattr(Extent, "read", fail)
    assert reader.read([extent]) == [body(extent)]
    assert len(source.fetched) == 2


def test_ranges_without_version_pass_through(source: Source, cache: DiskCache):
    reader = CachedReader(source, cache)
    extent = an_extent("a", etag=None)
    for _ in range(2):
        assert reader.read([extent]) == [body(extent)]
    assert len(source.fetched) == 2
    assert cache_files(cache) == []


def test_extents_are_opened_together_and_read_by_parts(source: Source, cache: DiskCache):
    reader = CachedReader(source, cache)
    ranges = [an_extent(number) for number in range(5)]
    reader.open(ranges[2]).close()
    for extent, range_ in zip(reader.open_all(ranges), ranges, strict=True):
        with extent:
            assert extent.range == range_
            assert extent.read(10, 20) == body(range_)[10:20]
    assert sorted(source.fetched) == [r.url for r in ranges]


def test_an_extent_is_a_cache_file_a_local_file_or_memory(source: Source, cache: DiskCache, tmp_path: Path):
    (tmp_path / "f").write_bytes(b"0123456789")
    local = Range(f"file://{tmp_path}/f", 2, 8, file_version((tmp_path / "f").stat()))
    cases = [
        (CachedReader(source, cache), an_extent("a"), Extent),
        (source, an_extent("a"), MemoryExtent),
        (LocalReader(), local, LocalExtent),
    ]
    for reader, range_, kind in cases:
        with open_extent(reader, range_) as extent:
            assert type(extent) is kind
            expected = b"34" if kind is LocalExtent else body(range_)[3:5]
            assert extent.read(3, 5) == expected
            both = bytearray(4)
            extent.read_into([(4, memoryview(both)[3:]), (3, memoryview(both)[1:3])])
            assert both == b"\0" + expected + expected[1:]


def test_threads_that_want_the_same_fetch_it_once(tmp_path: Path, cache: DiskCache):
    source = Source(tmp_path / "log", delay=0.05)
    reader = CachedReader(source, cache)
    ranges = [an_extent(number) for number in range(6)]
    with ThreadPoolExecutor(12) as pool:
        jobs: list[Callable[[], object]] = [lambda: reader.read(ranges), lambda: reader.read(ranges[::-1])[::-1]] * 6
        for got in pool.map(lambda job: job(), jobs):
            assert got == [body(range) for range in ranges]
    assert sorted(source.fetched) == [r.url for r in ranges]
    counts = reader.counter.counts()
    assert (counts.cache_hits, counts.cache_misses) == (66, 6)


def test_c004_an_object_replaced_at_the_same_length_is_new_bytes_for_a_new_data_set(tmp_path: Path):
    files = fsspec.filesystem("memory")
    folder = f"memory://{uuid.uuid4().hex}"
    for digit in (b"1", b"2"):
        files.pipe_file(f"{folder}/a.bin", digit * 100)
        ds = bf.open_dataset(folder + "/", cache=DiskCache(tmp_path / "cache", "10MB"))
        for _ in range(2):
            assert ds[0]["bin"] == digit * 100
