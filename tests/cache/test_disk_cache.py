from __future__ import annotations

import errno
import logging
import multiprocessing
import os
import pickle
import random
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from objects import an_extent, body, cache_files, disk_usage, read_all, temporary_files

from bucketfeed.cache import passes
from bucketfeed.cache.disk import DiskCache
from bucketfeed.cache.extent import Extent, MemoryExtent
from bucketfeed.errors import CacheError, ConfigError
from bucketfeed.store.ranges import Range


def never() -> bytes:
    raise AssertionError("fetched, although it is in the cache")


# -- keeping and finding


@pytest.mark.parametrize("length", [0, 1, 4095, 4096, 4072, 100_000, (1 << 20) + 1])
def test_what_was_put_is_got_byte_for_byte(cache: DiskCache, length: int):
    extent = an_extent("a", length)
    assert read_all(cache, extent) is None
    assert cache.put(extent, body(extent))
    assert read_all(cache, extent) == body(extent)
    assert read_all(DiskCache(cache.folder, "64MiB"), extent) == body(extent)


def test_offsets_are_those_of_the_object(cache: DiskCache):
    extent = Range("s3://bucket/a", 1000, 3000, "v1")
    for found in (
        cache.get_or_fetch(extent, lambda: body(extent)),
        cache.get(extent),
        MemoryExtent(extent, body(extent)),
    ):
        assert found is not None
        with found:
            assert found.read(1500, 1510) == body(extent)[500:510]


def test_url_version_start_and_stop_each_tell_extents_apart(cache: DiskCache):
    extents = [
        Range("s3://b/a", 0, 10, "v1"),
        Range("s3://b/A", 0, 10, "v1"),
        Range("s3://b/a", 0, 10, "v2"),
        Range("s3://b/a", 1, 10, "v1"),
        Range("s3://b/a", 0, 11, "v1"),
        Range("s3://b/a#?%20\udcff", 0, 11, "v1"),
    ]
    for number, extent in enumerate(extents):
        assert cache.put(extent, bytes([number]) * extent.length)
    assert [read_all(cache, e) for e in extents] == [bytes([n]) * e.length for n, e in enumerate(extents)]


def test_a_range_without_version_is_never_kept(cache: DiskCache):
    extent = an_extent("a", etag=None)
    assert not cache.put(extent, body(extent))
    assert cache.get(extent) is None
    assert isinstance(cache.get_or_fetch(extent, lambda: body(extent)), MemoryExtent)
    assert cache_files(cache) == []


def test_it_is_fetched_once_then_found(cache: DiskCache):
    extent = an_extent("a")
    with cache.get_or_fetch(extent, lambda: body(extent)) as first:
        assert isinstance(first, Extent)
        assert first.read(0, extent.stop) == body(extent)
    with cache.get_or_fetch(extent, never) as second:
        assert second.read(5, 10) == body(extent)[5:10]


def test_what_lacks_is_fetched_in_one_call_and_repeats_once(cache: DiskCache):
    here, *missing = (an_extent(name) for name in "abc")
    cache.put(here, body(here))
    calls: list[list[Range]] = []

    def fetch(ranges: list[Range]) -> list[bytes]:
        calls.append(ranges)
        return [body(range) for range in ranges]

    extents = cache.fetch([missing[0], here, missing[1], missing[0]], fetch)
    assert [e.range for e in extents] == [missing[0], here, missing[1], missing[0]]
    assert [e.read(0, 9) for e in extents] == [body(e.range)[:9] for e in extents]
    assert calls == [missing]


def test_a_fetch_that_fails_leaves_nothing_and_the_next_one_succeeds(cache: DiskCache):
    extent = an_extent("a")

    def fail() -> bytes:
        raise ValueError("no luck")

    used = cache.stats().bytes_used
    with pytest.raises(ValueError, match="no luck"):
        cache.get_or_fetch(extent, fail)
    assert (cache_files(cache), temporary_files(cache)) == ([], [])
    assert cache.stats().bytes_used == used
    with cache.get_or_fetch(extent, lambda: body(extent)) as found:
        assert found.read(0, 10) == body(extent)[:10]


@pytest.mark.parametrize("length", [99_999, 100_001])
def test_bytes_of_the_wrong_length_are_an_error_and_not_kept(cache: DiskCache, length: int):
    with pytest.raises(CacheError, match=rf"100000 bytes, not {length}"):
        cache.put(an_extent("a"), bytes(length))
    assert (cache_files(cache), temporary_files(cache)) == ([], [])


def test_a_memoryview_of_numbers_is_kept_by_its_bytes(cache: DiskCache):
    data = memoryview(bytearray(body(an_extent("a"))))
    assert cache.put(an_extent("a"), data)
    assert read_all(cache, an_extent("a")) == bytes(data)


# -- the limit


def test_the_least_recently_used_leave_first_and_disk_use_stays_below_the_limit(tmp_path: Path):
    cache = DiskCache(tmp_path / "cache", "2MiB")
    extents = [an_extent(number) for number in range(60)]
    for age, extent in enumerate(extents):
        assert cache.put(extent, body(extent))
        assert disk_usage(cache.folder) <= cache.limit_bytes
        for path in cache_files(cache):  # as if they were written hours apart
            if path.stat().st_mtime > 1e9:
                os.utime(path, (age, age))
        oldest = cache.get(extents[0])  # used again and again, so it stays
        assert oldest is not None
        oldest.close()
    kept = [number for number, extent in enumerate(extents) if read_all(cache, extent) is not None]
    assert kept[0] == 0
    assert kept[1:] == list(range(60 - len(kept) + 1, 60))
    assert len(kept) >= 15


def test_times_of_use_that_are_still_to_come_keep_no_file_from_leaving(tmp_path: Path):
    cache = DiskCache(tmp_path / "cache", "2MiB")
    odd = [an_extent(f"odd {number}") for number in range(5)]
    for extent in odd:
        assert cache.put(extent, body(extent))
    for path in cache_files(cache):  # a clock set back, an archive unpacked
        os.utime(path, (4e9, 4e9))
    for number in range(21):
        assert cache.put(an_extent(number), body(an_extent(number)))
    kept = [read_all(cache, extent) is not None for extent in [*odd, *map(an_extent, range(10, 21))]]
    assert kept == [False] * 5 + [True] * 11


def test_what_is_held_is_not_evicted_and_the_rest_goes_on_in_memory(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    cache = DiskCache(tmp_path / "cache", "1MiB")
    extents = [an_extent(number) for number in range(20)]
    held = [cache.get_or_fetch(extent, lambda e=extent: body(e)) for extent in extents]
    assert [e.read(0, e.range.stop) for e in held] == [body(e) for e in extents]
    on_disk = [e for e in held if isinstance(e, Extent)]
    assert 5 <= len(on_disk) <= 10
    assert held[: len(on_disk)] == on_disk
    assert disk_usage(cache.folder) <= cache.limit_bytes
    [warning] = [r.getMessage() for r in caplog.records]
    assert all(text in warning for text in (str(cache.folder), "in use", "limit 1 MiB", "free"))
    for extent in held:
        extent.close()
    assert cache.put(an_extent("new"), body(an_extent("new")))


def test_an_extent_larger_than_the_limit_is_read_without_the_cache(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    cache = DiskCache(tmp_path / "cache", "1MiB")
    small, large = an_extent("small"), an_extent("large", 2 << 20)
    cache.put(small, body(small))
    for _ in range(2):
        with cache.get_or_fetch(large, lambda: body(large)) as found:
            assert found.read(0, large.stop) == body(large)
    assert read_all(cache, small) == body(small)
    [warning] = [r.getMessage() for r in caplog.records]
    assert "s3://bucket/large" in warning


def test_indexes_count_into_the_limit(tmp_path: Path):
    cache = DiskCache(tmp_path / "cache", "2MiB")
    (cache.index_folder / "big.idx").write_bytes(bytes(1 << 20))
    for number in range(40):
        cache.put(an_extent(number), body(an_extent(number)))
        assert disk_usage(cache.folder) <= cache.limit_bytes
    assert 4 <= len(cache_files(cache)) <= 10
    assert cache.stats().bytes_used >= (1 << 20) + len(cache_files(cache)) * 100_000


def test_what_fits_no_more_beside_a_grown_index_leaves_at_once(tmp_path: Path):
    cache = DiskCache(tmp_path / "cache", "2MiB")
    for number in range(40):
        cache.put(an_extent(number), body(an_extent(number)))
    (cache.index_folder / "big.idx").write_bytes(bytes(1 << 20))
    assert disk_usage(cache.folder) > cache.limit_bytes
    cache.indexed()
    assert disk_usage(cache.folder) <= cache.limit_bytes
    assert read_all(cache, an_extent(39)) == body(an_extent(39))


def test_files_of_others_are_neither_counted_nor_removed(tmp_path: Path):
    cache = DiskCache(tmp_path / "cache", "1MiB")
    cache.put(an_extent("a"), body(an_extent("a")))
    foreign = [
        cache.folder / "notes.txt",
        cache.folder / "extents" / "README",
        cache.folder / "extents" / "deadbeef",
        cache_files(cache)[0].parent / "report.pdf",
        cache.index_folder / "mine.csv",
    ]
    for path in foreign[:4]:
        path.write_bytes(bytes(3 << 20))
    foreign[4].write_bytes(b"1,2")
    assert cache.stats().bytes_used < 200_000
    for number in range(20):
        assert cache.put(an_extent(number), body(an_extent(number)))
    cache.verify()
    cache.clear()
    assert all(path.exists() for path in foreign)
    assert cache_files(cache) == [cache.folder / foreign[3].relative_to(cache.folder)]


def test_a_limit_of_its_own_disk_is_the_default(tmp_path: Path):
    cache = DiskCache(tmp_path / "cache")
    free = cache.stats().free_bytes
    assert free // 3 < cache.limit_bytes < free


@pytest.mark.parametrize("ledger", [b"", b"garbage", b"9" * 32, b"-" * 40])
def test_a_damaged_ledger_is_counted_anew(tmp_path: Path, ledger: bytes):
    cache = DiskCache(tmp_path / "cache", "1MiB")
    for number in range(5):
        cache.put(an_extent(number), body(an_extent(number)))
    (cache.folder / "ledger").write_bytes(ledger)
    for number in range(5, 40):
        assert cache.put(an_extent(number), body(an_extent(number)))
        assert disk_usage(cache.folder) <= cache.limit_bytes


# -- passes over a data set in a new order each


def epoch(cache: DiskCache, extents: list[Range], seed: int, name: str | None) -> int:
    """Read all extents in a random order; return the number of hits."""
    if name is not None:
        cache.begin_pass("data", name)
    hits = 0
    for extent in random.Random(seed).sample(extents, len(extents)):
        misses: list[Range] = []

        def fetch(ranges: list[Range], misses: list[Range] = misses) -> list[bytes]:
            misses.extend(ranges)
            return [body(range) for range in ranges]

        [found] = cache.fetch([extent], fetch)
        with found:
            assert found.read(0, extent.stop) == body(extent)
        hits += not misses
    return hits


def aged(cache: DiskCache) -> None:
    for path in cache_files(cache):  # as if an hour had passed
        os.utime(path, (path.stat().st_mtime - 3600,) * 2)


def test_over_passes_the_hits_are_the_share_of_the_data_that_fits(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    cache = DiskCache(tmp_path / "cache", "1500kB")
    extents = [an_extent(number, 30_000) for number in range(80)]
    epoch(cache, extents, 0, "epoch 0")
    room = len(cache_files(cache))
    assert 35 <= room <= 45
    assert [epoch(cache, extents, number, f"epoch {number}") for number in range(1, 5)] == [room] * 4
    assert caplog.records == []  # that not all fits is no fault
    other = DiskCache(tmp_path / "other", "1500kB")
    assert max(epoch(other, extents, number, None) for number in range(5)) < room * 0.7


def test_what_an_ended_run_left_makes_room_for_the_next_data_set(tmp_path: Path):
    cache = DiskCache(tmp_path / "cache", "1500kB")
    epoch(cache, [an_extent(f"old/{number}", 30_000) for number in range(80)], 0, "epoch 0")
    aged(cache)
    fresh = DiskCache(cache.folder, "1500kB")
    extents = [an_extent(f"new/{number}", 30_000) for number in range(80)]
    fresh.begin_pass("new data", "epoch 0")
    for extent in extents:
        fresh.put(extent, body(extent))
    assert sum(read_all(fresh, extent) is not None for extent in extents) == len(cache_files(fresh)) > 35


def test_a_pass_is_the_same_for_all_processes_and_for_a_resumed_run(tmp_path: Path):
    cache = DiskCache(tmp_path / "cache", "1500kB")
    path = cache.index_folder / "data.pass"
    cache.begin_pass("data", "0")
    first = path.read_bytes()
    cache.begin_pass("data", "0")
    DiskCache(cache.folder, "1500kB").begin_pass("data", "0")
    assert path.read_bytes() == first
    began = passes.begin(path, "1")
    assert passes.begin(path, "0") == passes.begin(path, "1") == began  # one that is late changes nothing
    assert passes.begin(path, "2") > began
    path.write_bytes(b'[["half wr')
    assert passes.begin(path, "3") > began


# -- damage


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def cut_the_end(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 0x10
    path.write_bytes(data)


def flip_the_checksum(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def swap_for_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES = [truncate, cut_the_end, empty, flip, flip_the_checksum]


@pytest.mark.parametrize("damage", DAMAGES)
def test_c013_a_damaged_file_is_a_miss_for_a_new_process_and_healed(cache: DiskCache, damage):
    extent = an_extent("a")
    cache.put(extent, body(extent))
    damage(cache_files(cache)[0])
    fresh = DiskCache(cache.folder, "64MiB")
    assert fresh.get(extent) is None
    with fresh.get_or_fetch(extent, lambda: body(extent)) as found:
        assert found.read(0, extent.stop) == body(extent)
    assert read_all(DiskCache(cache.folder, "64MiB"), extent) == body(extent)


@pytest.mark.parametrize("damage", [truncate, empty])
def test_c013_a_file_cut_short_is_seen_by_the_process_that_wrote_it_too(cache: DiskCache, damage):
    extent = an_extent("a")
    cache.put(extent, body(extent))
    damage(cache_files(cache)[0])
    assert cache.get(extent) is None


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("by", ["writing", "reading"])
def test_c013_a_file_damaged_in_place_is_seen_by_the_process_that_has_used_it(cache: DiskCache, damage, by: str):
    extent = an_extent("a")
    if by == "writing":
        cache.get_or_fetch(extent, lambda: body(extent)).close()
    else:
        cache.put(extent, body(extent))
        assert read_all(cache, extent) == body(extent)
    inode = cache_files(cache)[0].stat().st_ino
    damage(cache_files(cache)[0])
    assert cache_files(cache)[0].stat().st_ino == inode
    with cache.get_or_fetch(extent, lambda: body(extent)) as found:
        assert found.read(0, extent.stop) == body(extent)


def test_c013_a_file_replaced_by_a_damaged_copy_is_seen_by_the_process_that_has_used_it(cache: DiskCache):
    extent = an_extent("a")
    cache.get_or_fetch(extent, lambda: body(extent)).close()
    [path] = cache_files(cache)
    copy = path.with_name("copy")
    shutil.copy2(path, copy)
    flip(copy)
    os.utime(copy, (path.stat().st_atime, path.stat().st_mtime))
    os.replace(copy, path)
    assert read_all(cache, extent) is None


def test_c013_a_file_cut_while_it_is_open_is_an_error_that_names_it(cache: DiskCache):
    extent = an_extent("a")
    whole = memoryview(bytearray(extent.length))
    with cache.get_or_fetch(extent, lambda: body(extent)) as found:
        [path] = cache_files(cache)
        truncate(path)
        for read in (lambda: found.read(0, extent.stop), lambda: found.read_into([(0, whole)])):
            with pytest.raises(CacheError) as error:
                read()
            assert all(text in str(error.value) for text in ("s3://bucket/a", str(path)))


def test_a_folder_in_the_place_of_a_file_is_read_around(cache: DiskCache, caplog: pytest.LogCaptureFixture):
    extent = an_extent("a")
    cache.put(extent, body(extent))
    swap_for_a_folder(cache_files(cache)[0])
    with DiskCache(cache.folder, "64MiB").get_or_fetch(extent, lambda: body(extent)) as found:
        assert found.read(0, extent.stop) == body(extent)
    assert "directory" in caplog.text


def test_verify_removes_what_is_damaged_and_nothing_else(cache: DiskCache):
    extents = [an_extent(number) for number in range(8)]
    for extent in extents:
        cache.put(extent, body(extent))
    for path, damage in zip(cache_files(cache), DAMAGES, strict=False):
        damage(path)
    assert cache.verify() == len(DAMAGES)
    assert cache.verify() == 0
    assert sum(read_all(cache, extent) == body(extent) for extent in extents) == 3


def test_clear_empties_it_and_readers_go_on(cache: DiskCache):
    extent = an_extent("a")
    (cache.index_folder / "x.manifest").write_bytes(b"x")
    with cache.get_or_fetch(extent, lambda: body(extent)) as found:
        cache.clear()
        assert found.read(0, extent.stop) == body(extent)
    assert cache_files(cache) == list(cache.index_folder.iterdir()) == []
    assert cache.put(extent, body(extent))


# -- a disk that is too small


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(folder)], capture_output=True)
    if mount.returncode:
        pytest.skip(f"file systems may not be mounted here: {mount.stderr.decode()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_c007_on_a_disk_smaller_than_the_limit_old_extents_make_room(
    small_disk: Path, caplog: pytest.LogCaptureFixture
):
    cache = DiskCache(small_disk / "cache", "1GiB")
    extents = [an_extent(number) for number in range(40)]
    for _ in range(2):
        for extent in extents:
            with cache.get_or_fetch(extent, lambda e=extent: body(e)) as found:
                assert found.read(0, extent.stop) == body(extent)
                assert isinstance(found, Extent)
    assert caplog.records == []
    assert sum(read_all(DiskCache(cache.folder, "1GiB"), e) == body(e) for e in extents) == len(cache_files(cache)) > 10
    assert temporary_files(cache) == []


def test_c007_on_a_disk_that_others_have_filled_reading_goes_on(small_disk: Path, caplog: pytest.LogCaptureFixture):
    cache = DiskCache(small_disk / "cache", "1GiB")
    with open(small_disk / "other", "wb") as other:
        os.posix_fallocate(other.fileno(), 0, shutil.disk_usage(small_disk).free)
    for number in range(5):
        extent = an_extent(number)
        with cache.get_or_fetch(extent, lambda e=extent: body(e)) as found:
            assert found.read(0, extent.stop) == body(extent)
    assert (cache_files(cache), temporary_files(cache)) == ([], [])
    [warning] = [r.getMessage() for r in caplog.records]
    assert all(text in warning for text in (str(cache.folder), "no space", "limit 1 GiB", "free on its disk: 0 B"))
    (small_disk / "other").unlink()
    assert cache.put(an_extent("later"), body(an_extent("later")))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS])
@pytest.mark.parametrize("call", ["posix_fallocate", "pwrite", "rename", "ftruncate"])
def test_c007_whatever_the_disk_refuses_reading_goes_on_and_nothing_stays(
    cache: DiskCache, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, call: str, number: int
):
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, call, refuse)
    for extent in map(an_extent, range(3)):
        with cache.get_or_fetch(extent, lambda e=extent: body(e)) as found:
            assert found.read(0, extent.stop) == body(extent)
    assert (cache_files(cache), temporary_files(cache)) == ([], [])
    assert len(caplog.records) == 1
    monkeypatch.undo()
    assert cache.put(an_extent("later"), body(an_extent("later")))


def test_without_preallocation_the_limit_holds_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "not supported")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    cache = DiskCache(tmp_path / "cache", "1MiB")
    for extent in map(an_extent, range(30)):
        assert cache.put(extent, body(extent))
        assert disk_usage(cache.folder) <= cache.limit_bytes


# -- the folder


def test_folder_and_files_are_for_the_user_alone(cache: DiskCache):
    cache.put(an_extent("a"), body(an_extent("a")))
    assert stat.S_IMODE(cache.folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(cache_files(cache)[0].stat().st_mode) == 0o600


@pytest.mark.parametrize("below", ["", "cache"])
def test_a_folder_that_is_a_file_is_named(tmp_path: Path, below: str):
    (tmp_path / "file").write_text("x")
    with pytest.raises(CacheError, match=rf"{tmp_path}/file.*another folder"):
        DiskCache(tmp_path / "file" / below)


def test_a_folder_that_may_not_be_written_is_named_with_its_owner():
    def refused() -> None:
        if os.geteuid() == 0:
            os.setuid(12345)
        try:
            DiskCache(folder)
        except CacheError as e:
            there.send(str(e))
        else:
            there.send("no error")

    with tempfile.TemporaryDirectory() as parent:  # one that other users may pass
        os.chmod(parent, 0o755)
        folder = Path(parent) / "theirs"
        (folder / "indexes").mkdir(parents=True)
        os.chmod(folder, 0o555)
        here, there = multiprocessing.Pipe(duplex=False)
        child = multiprocessing.get_context("fork").Process(target=refused)
        child.start()
        assert here.poll(30)
        said = here.recv()
        child.join(30)
    assert all(text in said for text in (str(folder), f"user {os.geteuid()}", "another folder"))


@pytest.mark.parametrize("limit", [0, "0GB", -1, "many", 1.5, "-3"])
def test_a_limit_that_is_none_is_refused(tmp_path: Path, limit):
    with pytest.raises(ConfigError, match="limit_bytes"):
        DiskCache(tmp_path / "cache", limit)


def test_a_copy_is_the_same_folder_and_limit(cache: DiskCache):
    cache.put(an_extent("a"), body(an_extent("a")))
    state = pickle.dumps(cache)
    copy = pickle.loads(state)
    assert len(state) < 500
    assert (copy.folder, copy.limit_bytes) == (cache.folder, cache.limit_bytes)
    assert read_all(copy, an_extent("a")) == body(an_extent("a"))


def test_its_repr_tells_folder_limit_and_use(cache: DiskCache):
    cache.put(an_extent("a", 1 << 20), bytes(1 << 20))
    assert str(cache.folder) in repr(cache)
    assert "limit=64 MiB" in repr(cache)
    assert "used=1." in repr(cache)


def test_a_folder_removed_meanwhile_is_made_anew(cache: DiskCache):
    cache.put(an_extent("a"), body(an_extent("a")))
    shutil.rmtree(cache.folder)
    assert cache.get(an_extent("a")) is None
    assert cache.put(an_extent("a"), body(an_extent("a")))
    assert read_all(cache, an_extent("a")) == body(an_extent("a"))
    assert cache.stats().files == 1


def test_a_hit_says_nothing(cache: DiskCache, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.DEBUG)
    cache.put(an_extent("a"), body(an_extent("a")))
    read_all(cache, an_extent("a"))
    assert caplog.records == []
