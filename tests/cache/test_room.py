"""The ledger never says too little, whatever moves while the folder is looked through."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from objects import an_extent, body, cache_files, disk_usage

from bucketfeed.cache import claim, room
from bucketfeed.cache.disk import DiskCache


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
        assert listed.wait(30)

    def put() -> None:
        assert cache.put(an_extent("a"), body(an_extent("a")))
        published.set()

    cache.stats()  # the ledger is made, so that putting does not scan
    monkeypatch.setattr(room, "_entries", entries_of_a_moment)
    monkeypatch.setattr(claim, "_write_all", write_and_wait)
    putting = threading.Thread(target=put)
    putting.start()
    assert written.wait(30)
    used = cache.stats().bytes_used
    putting.join(30)
    assert len(cache_files(cache)) == 1
    assert used >= disk_usage(cache.folder)
