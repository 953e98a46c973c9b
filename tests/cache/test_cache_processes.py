"""Many processes on one folder: each fetch once, never half a file, and nothing that a dead one leaves in the way."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from objects import Source, an_extent, body, cache_files, disk_usage, read_all, temporary_files

from bucketfeed.cache import room
from bucketfeed.cache.disk import DiskCache
from bucketfeed.cache.reader import CachedReader

FORK = multiprocessing.get_context("fork")
SECONDS = 60  # no wait in here is longer


@contextlib.contextmanager
def running(count: int, work: Callable[..., object], *args: Any) -> Iterator[list[BaseProcess]]:
    """Run `work(number, *args)` in processes; at the end all must have ended well, except those that were killed."""
    processes: list[BaseProcess] = [FORK.Process(target=work, args=(number, *args)) for number in range(count)]
    for process in processes:
        process.start()
    try:
        yield processes
        for process in processes:
            process.join(SECONDS)
        assert {process.exitcode for process in processes} <= {0, -signal.SIGKILL}
    finally:
        for process in processes:
            process.kill()
            process.join(SECONDS)


@contextlib.contextmanager
def highest_disk_usage(cache: DiskCache) -> Iterator[Callable[[], int]]:
    """Look at the folder over and over; the function given returns the most seen.

    The ledger is locked for each look: one that goes through the folders one by one would count what is removed in
    the first and then written in the last twice.
    """
    done = threading.Event()
    seen = [0]

    def watch() -> None:
        while not done.wait(0.005):
            with room.locked(cache.folder / "ledger"):
                seen[0] = max(seen[0], disk_usage(cache.folder))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield lambda: seen[0]
    finally:
        done.set()
        watcher.join(SECONDS)


def test_c001_processes_that_come_during_the_fetch_get_the_whole_object_fetched_once(tmp_path: Path, cache: DiskCache):
    extent = an_extent("big", 8 << 20)
    start = FORK.Barrier(16)
    whole = body(extent)

    def read(number: int) -> None:
        start.wait(SECONDS)
        source = Source(tmp_path / "log", delay=0.3)
        assert CachedReader(source, cache).read([extent]) == [whole]

    (tmp_path / "log").touch()
    with running(16, read):
        pass
    assert len((tmp_path / "log").read_text().split()) == 1
    assert len(cache_files(cache)) == 1
    assert temporary_files(cache) == []


def test_two_processes_that_want_the_same_in_opposite_order_never_wait_for_each_other(tmp_path: Path, cache: DiskCache):
    extents = [an_extent(number, 1000) for number in range(40)]
    start = FORK.Barrier(4)

    def read(number: int) -> None:
        mine = extents if number % 2 else extents[::-1]
        start.wait(SECONDS)
        source = Source(tmp_path / "log", delay=0.05)
        assert CachedReader(source, cache).read(mine) == [body(extent) for extent in mine]

    (tmp_path / "log").touch()
    with running(4, read):
        pass
    assert sorted((tmp_path / "log").read_text().split()) == sorted(extent.url for extent in extents)


def test_c005_disk_use_never_passes_the_limit_while_many_fill_it(tmp_path: Path):
    cache = DiskCache(tmp_path / "cache", "5MiB")
    extents = [an_extent(number, 256 << 10) for number in range(60)]
    (tmp_path / "log").touch()

    def read(number: int) -> None:
        reader = CachedReader(Source(tmp_path / "log"), cache)
        for _ in range(2):
            for extent in random.Random(number).sample(extents, len(extents)):
                assert reader.read([extent]) == [body(extent)]

    with highest_disk_usage(cache) as highest, running(8, read):
        pass
    assert 3 << 20 < highest() <= cache.limit_bytes
    assert cache.stats().bytes_used <= cache.limit_bytes
    assert temporary_files(cache) == []


def test_c009_what_one_process_has_open_another_never_takes_away(tmp_path: Path):
    cache = DiskCache(tmp_path / "cache", "300kB")  # two extents
    extents = [an_extent(number) for number in range(12)]
    (tmp_path / "log").touch()

    def read(number: int) -> None:
        reader = CachedReader(Source(tmp_path / "log"), cache)
        for epoch, extent in itertools.product(range(5), extents):
            with reader.open(extent) as held:
                time.sleep(0.002 * ((number + epoch) % 2))
                assert held.read(0, extent.stop) == body(extent)

    with running(6, read):
        pass
    assert disk_usage(cache.folder) <= cache.limit_bytes


def dies_in(act: Callable[[Callable[[], None]], object]) -> None:
    """Run `act` in a process and kill -9 it when `act` has called the function that it gets."""
    reached = FORK.Event()

    def hang() -> None:
        reached.set()
        threading.Event().wait()

    process = FORK.Process(target=act, args=(hang,))
    process.start()
    try:
        assert reached.wait(SECONDS)
    finally:
        process.kill()
        process.join()  # with a bound it would wait for the process's children, too


def test_c011_killed_in_the_middle_of_a_fetch_the_next_one_goes_on_at_once(tmp_path: Path, cache: DiskCache):
    extent = an_extent("a", 5 << 20)
    dies_in(lambda hang: CachedReader(Source(tmp_path / "log", before=hang), cache).read([extent]))
    assert len(temporary_files(cache)) == 1
    began = time.monotonic()
    assert CachedReader(Source(tmp_path / "log"), cache).read([extent]) == [body(extent)]
    assert time.monotonic() - began < 5
    assert temporary_files(cache) == []


def test_c011_killed_in_the_middle_of_writing_nothing_half_is_ever_seen(tmp_path: Path, cache: DiskCache):
    extent = an_extent("a", 5 << 20)
    write = os.pwrite

    def write_half(hang: Callable[[], None]) -> None:
        def half(fd: int, data: memoryview, offset: int) -> int:
            if len(data) == extent.length:
                write(fd, data[: 1 << 20], offset)
                hang()
            return write(fd, data, offset)

        os.pwrite = half
        CachedReader(Source(tmp_path / "log"), cache).read([extent])

    dies_in(write_half)
    assert len(temporary_files(cache)) == 1
    assert cache.get(extent) is None
    assert cache.stats().bytes_used < 1 << 20  # what was left is gone
    assert temporary_files(cache) == []
    assert CachedReader(Source(tmp_path / "log"), cache).read([extent]) == [body(extent)]


def test_c011_killed_in_the_middle_of_an_eviction_others_go_on(tmp_path: Path):
    cache = DiskCache(tmp_path / "cache", "1MiB")
    for number in range(8):
        cache.put(an_extent(number), body(an_extent(number)))

    def evict(hang: Callable[[], None]) -> None:
        removed = itertools.count()
        remove = room.remove_unused
        room.remove_unused = lambda path: hang() if next(removed) == 1 else remove(path)
        for number in range(8, 40):
            cache.put(an_extent(number), body(an_extent(number)))

    dies_in(evict)
    began = time.monotonic()
    for number in range(40, 60):
        assert cache.put(an_extent(number), body(an_extent(number)))
        assert disk_usage(cache.folder) <= cache.limit_bytes
    assert time.monotonic() - began < 10


def test_c011_a_child_forked_under_the_ledgers_lock_does_not_keep_it_when_the_parent_dies(cache: DiskCache):
    end = FORK.Event()
    born = FORK.Event()

    def parent(hang: Callable[[], None]) -> None:
        with room.locked(cache.folder / "ledger"):
            if os.fork() == 0:
                born.set()
                end.wait(SECONDS)
                os._exit(0)
            hang()

    try:
        dies_in(parent)
        assert born.wait(SECONDS)
        began = time.monotonic()
        assert cache.put(an_extent("a"), body(an_extent("a")))
        assert time.monotonic() - began < 5
    finally:
        end.set()


def test_what_was_open_at_a_fork_can_be_evicted_once_the_parent_closes_it(tmp_path: Path):
    cache = DiskCache(tmp_path / "cache", "1MiB")
    extents = [an_extent(number) for number in range(7)]
    held = [cache.get_or_fetch(extent, lambda e=extent: body(e)) for extent in extents]
    end = FORK.Event()

    def child(number: int) -> None:
        assert [e.read(0, e.range.stop) for e in held] == [body(e) for e in extents]
        assert end.wait(SECONDS)

    with running(1, child):
        for extent in held:
            extent.close()
        for number in range(10, 30):
            assert cache.put(an_extent(number), body(an_extent(number)))
        end.set()


def test_what_a_parent_holds_stays_when_a_forked_child_ends(tmp_path: Path):
    cache = DiskCache(tmp_path / "cache", "1MiB")
    held = cache.get_or_fetch(an_extent("held"), lambda: body(an_extent("held")))

    def child(number: int) -> None:
        held.close()

    with running(2, child):
        pass
    for number in range(30):
        cache.put(an_extent(number), body(an_extent(number)))
    assert read_all(cache, an_extent("held")) == body(an_extent("held"))
    held.close()


def test_a_fork_while_threads_fetch_leaves_the_child_able_to_read(tmp_path: Path, cache: DiskCache):
    extents = [an_extent(number, 10_000) for number in range(400)]
    reader = CachedReader(Source(tmp_path / "log"), cache)
    done = threading.Event()

    def fetch(first: int) -> None:
        for extent in itertools.cycle(extents[first:] + extents[:first]):
            if done.is_set():
                return
            reader.read([extent])

    def child(number: int) -> None:
        for extent in extents[number::40]:
            assert reader.read([extent]) == [body(extent)]

    threads = [threading.Thread(target=fetch, args=(100 * n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(5):
            with running(4, child):
                pass
    finally:
        done.set()
        for thread in threads:
            thread.join(SECONDS)


def test_c012_two_jobs_share_a_folder_after_a_third_was_killed_in_it(tmp_path: Path, cache: DiskCache):
    before = set(os.listdir("/dev/shm"))
    first, second = ([an_extent(f"{name}/{n}", 50_000) for n in range(30)] for name in "ab")

    def read(number: int) -> None:
        reader = CachedReader(Source(tmp_path / f"log{number}"), DiskCache(cache.folder, "10MB"))
        extents = (first, second)[number]
        for _ in range(3):
            assert reader.read(extents) == [body(extent) for extent in extents]

    dies_in(lambda hang: CachedReader(Source(tmp_path / "log", before=hang), cache).read(first))
    with running(2, read):
        pass
    assert [len((tmp_path / f"log{n}").read_text().split()) for n in (0, 1)] == [30, 30]
    assert set(os.listdir("/dev/shm")) <= before


def test_killed_again_and_again_at_any_moment_bytes_stay_right_and_the_limit_holds(tmp_path: Path):
    cache = DiskCache(tmp_path / "cache", "2MiB")
    extents = [an_extent(number, 20_000 + 7_000 * (number % 20)) for number in range(80)]
    whole = {extent: body(extent) for extent in extents}
    (tmp_path / "log").touch()
    reads = FORK.Value("q", 0, lock=False)

    def read(seed: int) -> None:
        source = Source(tmp_path / "log")
        source.read = lambda ranges: [whole[r] for r in ranges]  # type: ignore[method-assign]
        reader = CachedReader(source, DiskCache(cache.folder, cache.limit_bytes))
        dice = random.Random(seed)
        while True:
            some = dice.sample(extents, dice.choice([1, 1, 2, 10]))
            if dice.random() < 0.5:
                assert reader.read(some) == [whole[extent] for extent in some]
            else:
                with reader.open(some[0]) as held:
                    assert held.read(0, some[0].stop) == whole[some[0]]
            reads.value += 1  # about: a lock would be kept by one killed

    dice = random.Random(1)
    seeds = itertools.count()
    processes: list[BaseProcess] = []

    def begin() -> BaseProcess:
        process = FORK.Process(target=read, args=(next(seeds),))
        process.start()
        return process

    try:
        processes = [begin() for _ in range(8)]
        with highest_disk_usage(cache) as highest:
            end = time.monotonic() + 6
            while time.monotonic() < end:
                time.sleep(dice.uniform(0, 0.06))
                victim = dice.randrange(len(processes))
                assert processes[victim].is_alive()  # none ended by itself: each error would end one
                processes[victim].kill()
                processes[victim].join(SECONDS)
                processes[victim] = begin()
    finally:
        for process in processes:
            process.kill()
            process.join(SECONDS)
    assert reads.value > 100
    assert 1 << 20 < highest() <= cache.limit_bytes
    assert cache.verify() == 0
    assert temporary_files(cache) == []
    assert disk_usage(cache.folder) <= cache.stats().bytes_used <= disk_usage(cache.folder) + 18 * 4096
    kept = [extent for extent in extents if read_all(cache, extent) is not None]
    assert len(kept) == len(cache_files(cache)) > 5
    assert all(read_all(cache, extent) == whole[extent] for extent in kept)
