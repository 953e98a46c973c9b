"""Objects with bytes that anyone can work out, a reader of them that counts over processes, and looks at a folder."""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from bucketfeed.cache.disk import DiskCache
from bucketfeed.store.ranges import Buffer, Counter, Range


def an_extent(name: object, length: int = 100_000, etag: str | None = "v1") -> Range:
    return Range(f"s3://bucket/{name}", 0, length, etag)


def body(range: Range) -> bytes:
    """Return the bytes of a range: a function of url, etag and offset."""
    whole = random.Random(f"{range.url} {range.etag}").randbytes(range.stop)
    return whole[range.start :]


class Source:
    """Reads objects made of `body`; each range fetched adds its url as a line to the file `log`, in any process."""

    is_local = False

    def __init__(self, log: Path, *, delay: float = 0.0, before: Callable[[], object] | None = None) -> None:
        self.log = log
        self.delay = delay
        self.before = before
        self.counter = Counter()
        log.touch()

    def read(self, ranges: Sequence[Range]) -> list[Buffer]:
        fd = os.open(self.log, os.O_WRONLY | os.O_APPEND)
        for range in ranges:
            os.write(fd, f"{range.url}\n".encode())
        os.close(fd)
        if self.before is not None:
            self.before()
        time.sleep(self.delay)
        self.counter.add(requests=1, bytes_fetched=sum(range.length for range in ranges))
        return [body(range) for range in ranges]

    @property
    def fetched(self) -> list[str]:
        return self.log.read_text().split()


def disk_usage(folder: Path) -> int:
    """Return what `du` would: the blocks of all that is in the folder, folders too."""
    total = 0
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            with contextlib.suppress(FileNotFoundError):
                total += os.lstat(os.path.join(parent, name)).st_blocks * 512
    return total


def cache_files(cache: DiskCache) -> list[Path]:
    return [path for path in sorted(cache.folder.glob("extents/*/*")) if path.suffix != ".tmp"]


def temporary_files(cache: DiskCache) -> list[Path]:
    return sorted(cache.folder.glob("extents/*/*.tmp"))


def read_all(cache: DiskCache, range: Range) -> bytes | None:
    extent = cache.get(range)
    if extent is None:
        return None
    with extent:
        return extent.read(range.start, range.stop)
