"""The ledger never says too little, and no lock outlives its holder, whatever others do to the folder meanwhile."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from objects import Source, an_extent, body, cache_files, disk_usage, temporary_files
from test_cache_processes import FORK, SECONDS, dies_in

from bucketfeed.cache import claim, room
from bucketfeed.cache.disk import DiskCache
from bucketfeed.cache.extent import TRAILER_BYTES
from bucketfeed.cache.reader import CachedReader


def test_a_file_published_in_the_middle_of_a_scan_is_counted(cache: DiskCache, monkeypatch: pytest.MonkeyPatch):
    written, listed, published = threading.Event(), threading.Event(), threading.Event()
    entries, write = room._entries, claim._write_all

    def entries_of_a_moment(folder: str | Path) -> Iterator[object]:
        found = list(entries(folder))
        if Path(folder).parent.name == "extents":
            listed.set()
            published.wait(0.2)  # for ever, where publishing waits for the scan
        yield from found

    def write_and_wait(*args: object) -> None:
        write(*args)
        written.set()
        assert listed.wait(SECONDS)

    def put() -> None:
        assert cache.put(an_extent("a"), body(an_extent("a")))
        published.set()

    cache.stats()  # the ledger is made, so that putting does not scan
    monkeypatch.setattr(room, "_entries", entries_of_a_moment)
    monkeypatch.setattr(claim, "_write_all", write_and_wait)
    putting = threading.Thread(target=put)
    putting.start()
    assert written.wait(SECONDS)
    used = cache.stats().bytes_used
    putting.join(SECONDS)
    assert len(cache_files(cache)) == 1
    assert used >= disk_usage(cache.folder)


def test_all_that_du_sees_is_counted(cache: DiskCache):
    for number in range(100):  # so that every folder is there
        assert cache.put(an_extent(number, 10), body(an_extent(number, 10)))
    du = subprocess.run(["du", "-s", "-B1", cache.folder], capture_output=True, text=True, check=True)
    assert int(du.stdout.split()[0]) == cache.stats().bytes_used


def test_who_waits_for_a_ledger_that_is_removed_locks_the_new_one(tmp_path: Path):
    path = tmp_path / "ledger"
    opened = threading.Event()
    locked_the_right_one: list[bool] = []

    def wait() -> None:
        with room.locked(path) as fd:
            locked_the_right_one.append(room.is_at(fd, path))

    with room.locked(path), pytest.MonkeyPatch.context() as patch:
        patch.setattr(room, "open_locks", AddSets(room.open_locks, opened))
        waiting = threading.Thread(target=wait)
        waiting.start()
        assert opened.wait(SECONDS)
        path.unlink()
    waiting.join(SECONDS)
    assert locked_the_right_one == [True]


class AddSets(set[int]):
    """A set that sets an event when something is added to it."""

    def __init__(self, items: set[int], event: threading.Event) -> None:
        super().__init__(items)
        self._event = event

    def add(self, item: int) -> None:
        super().add(item)
        self._event.set()


def test_a_temporary_file_removed_by_hand_never_publishes_what_another_began(cache: DiskCache):
    extent = an_extent("a")
    cache.put(extent, body(extent))
    cache_files(cache)[0].unlink()
    mine = cache._claim(extent)
    temporary_files(cache)[0].unlink()
    theirs = cache._claim(extent)
    assert mine is not None
    assert theirs is not None
    assert cache._room.reserve(theirs._fd, extent.length + TRAILER_BYTES)
    assert mine.publish(body(extent)).read(0, 9) == body(extent)[:9]
    mine.abandon()
    assert cache.get(extent, held=False) is None
    theirs.publish(body(extent)).close()
    found = cache.get(extent, held=False)
    assert found is not None
    assert found.read(0, extent.stop) == body(extent)
    found.close()


def test_where_no_folder_can_be_made_nobody_is_waited_for(
    tmp_path: Path, cache: DiskCache, caplog: pytest.LogCaptureFixture
):
    (cache.folder / "extents").symlink_to(tmp_path / "nowhere")
    began = time.monotonic()
    with cache.get_or_fetch(an_extent("a"), lambda: body(an_extent("a"))) as found:
        assert found.read(0, 9) == body(an_extent("a"))[:9]
    assert time.monotonic() - began < 5
    assert "No such file" in caplog.text


def test_c011_a_child_forked_during_a_fetch_does_not_keep_the_claim_when_the_parent_dies(
    tmp_path: Path, cache: DiskCache
):
    extent = an_extent("a")
    end, born = FORK.Event(), FORK.Event()

    def parent(hang: Callable[[], None]) -> None:
        fetching = threading.Event()

        def fetch() -> None:
            fetching.set()
            threading.Event().wait()

        reader = CachedReader(Source(tmp_path / "log", before=fetch), cache)
        threading.Thread(target=reader.read, args=([extent],), daemon=True).start()
        assert fetching.wait(SECONDS)
        if os.fork() == 0:
            born.set()
            end.wait(SECONDS)
            os._exit(0)
        assert born.wait(SECONDS)
        hang()

    try:
        dies_in(parent)
        began = time.monotonic()
        assert CachedReader(Source(tmp_path / "log"), cache).read([extent]) == [body(extent)]
        assert time.monotonic() - began < 5
    finally:
        end.set()
