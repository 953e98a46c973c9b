"""Reads ranges of files on this machine, by pread: nothing is faster, and nothing is held in memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TypeVar

from bucketfeed.store.faults import Fault, ShortBodyError, check_version, fault_of, our_error
from bucketfeed.store.ranges import Buffer, Counter, Range
from bucketfeed.store.retry import Retry
from bucketfeed.store.urls import parse_url

T = TypeVar("T")


def file_version(status: os.stat_result) -> str:
    """Return what names the version of a file: time of change, size and inode."""
    return f"{status.st_mtime_ns:x}-{status.st_size:x}-{status.st_ino:x}"


class LocalExtent:
    """A range of an open file."""

    def __init__(self, range: Range, counter: Counter) -> None:
        self.range = range
        self._counter = counter
        self._path = parse_url(range.url).key
        self._fd = self._steadily(lambda: os.open(self._path, os.O_RDONLY | os.O_CLOEXEC))

    def read(self, start: int, stop: int) -> bytes:
        """Return bytes `start` to `stop` of the file, of the version asked for."""
        return self.read_all([(start, stop)])[0]

    def read_all(self, spans: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return the bytes of each span as `read` does; the version is looked up once, after all of them."""
        fd, pread = self._fd, os.pread
        bodies = self._steadily(lambda: [pread(fd, stop - start, start) for start, stop in spans])
        self._check(spans, list(map(len, bodies)))
        return bodies

    def read_into(self, parts: Sequence[tuple[int, memoryview]]) -> None:
        """Fill each buffer with the bytes of the file from its start on; the version is looked up as in `read_all`."""
        fd, preadv = self._fd, os.preadv
        lengths = self._steadily(lambda: [preadv(fd, [part], start) for start, part in parts])
        self._check([(start, start + len(part)) for start, part in parts], lengths)

    def _check(self, spans: Sequence[tuple[int, int]], lengths: list[int]) -> None:
        check_version(self.range, file_version(self._steadily(lambda: os.fstat(self._fd))))
        for length, (start, stop) in zip(lengths, spans, strict=True):
            if length != stop - start:
                short = ShortBodyError(f"got {length} of {stop - start} bytes")
                raise our_error(short, f"{self.range.url} [{start}:{stop}]") from short
        self._counter.add(requests=len(lengths), bytes_fetched=sum(lengths))

    def _steadily(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except OSError as e:
            if fault_of(e) is not Fault.PASSING:
                raise our_error(e, str(self.range)) from e
            return Retry().call(call, str(self.range), self._counter)  # a mounted store: Drive, NFS, FUSE

    def close(self) -> None:
        """Close the file."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> LocalExtent:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_fd"):
            self.close()


class LocalReader:
    """A `RangeReader` of `file://` URLs."""

    is_local = True

    def __init__(self, *, counter: Counter | None = None) -> None:
        self.counter = counter or Counter()

    def read(self, ranges: Sequence[Range]) -> list[Buffer]:
        """Return the bytes of each range; see `RangeReader.read`."""
        return [self._read(range) if range.length else b"" for range in ranges]

    def open(self, range: Range) -> LocalExtent:
        """Return the range as an open file: its parts are read when they are asked for."""
        return LocalExtent(range, self.counter)

    def _read(self, range: Range) -> bytes:
        with self.open(range) as extent:
            return extent.read(range.start, range.stop)

    def __reduce__(self) -> tuple[type[LocalReader], tuple[()]]:
        return type(self), ()

    def __repr__(self) -> str:
        return "LocalReader()"
