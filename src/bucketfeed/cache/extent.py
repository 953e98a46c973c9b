"""What a read may come from: an extent in a cache file, in memory, or in a file of this machine."""

from __future__ import annotations

import fcntl
import os
import struct
import time
from collections.abc import Sequence
from typing import TypeAlias

import xxhash

from bucketfeed.errors import CacheError
from bucketfeed.store.local import LocalExtent
from bucketfeed.store.ranges import Buffer, Range

# At the end of a cache file, so that the payload starts at a page: magic, length of the payload, its xxh3.
_TRAILER = struct.Struct("<8sQQ")
_MAGIC = b"bfextnt1"
TRAILER_BYTES = _TRAILER.size

_CHECKED_AT_ONCE = 1 << 20
_WHOLE_NS = 1_000_000
_HOLD_TRIES = (0.0, 0.0002, 0.0005, 0.001, 0.002, 0.005)  # seconds: a writer or evictor has it no longer than this


class MemoryExtent:
    """A range whose bytes are held in memory."""

    def __init__(self, range: Range, data: Buffer) -> None:
        self.range = range
        self._data = memoryview(data)

    def read(self, start: int, stop: int) -> bytes:
        """Return bytes `start` to `stop` of the object; they lie inside the range."""
        return bytes(self._data[start - self.range.start : stop - self.range.start])

    def read_all(self, spans: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return the bytes of each span as `read` does."""
        data, at = self._data, self.range.start
        return [bytes(data[start - at : stop - at]) for start, stop in spans]

    def read_into(self, parts: Sequence[tuple[int, memoryview]]) -> None:
        """Fill each buffer with the bytes of the object from its start on."""
        data, at = self._data, self.range.start
        for start, part in parts:
            part[:] = data[start - at : start - at + len(part)]

    def close(self) -> None:
        """Let the bytes go."""
        self._data.release()

    def __enter__(self) -> MemoryExtent:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Extent:
    """A range in an open cache file, which stays readable until `close` even if it is evicted meanwhile."""

    __slots__ = ("_fd", "_pid", "path", "range")

    def __init__(self, range: Range, fd: int, path: str) -> None:
        self.range = range
        self.path = path
        self._fd = fd
        self._pid = os.getpid()

    def read(self, start: int, stop: int) -> bytes:
        """Return bytes `start` to `stop` of the object; they lie inside the range.

        Raises `CacheError` where the disk fails or the file was cut short by others.
        """
        try:
            return pread(self._fd, stop - start, start - self.range.start)
        except OSError as e:
            raise self._failed(e) from e

    def read_all(self, spans: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return the bytes of each span as `read` does."""
        return [self.read(start, stop) for start, stop in spans]

    def read_into(self, parts: Sequence[tuple[int, memoryview]]) -> None:
        """Fill each buffer with the bytes of the object from its start on."""
        try:
            for start, part in parts:
                _pread_into(self._fd, part, start - self.range.start)
        except OSError as e:
            raise self._failed(e) from e

    def _failed(self, error: OSError) -> CacheError:
        return CacheError(
            f"{self.range} can't be read from its cache file {self.path}: {error}; check the disk, remove the file"
        )

    def contents(self) -> bytes:
        """Return all that the file holds, also where it is not as long as the range. Raises `CacheError` as `read`."""
        return self.read(self.range.start, self.range.start + os.fstat(self._fd).st_size - TRAILER_BYTES)

    @property
    def inode(self) -> int:
        """The number of the open file."""
        return os.fstat(self._fd).st_ino

    def close(self) -> None:
        """Close the file; from now on it may be evicted."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            # A child forked meanwhile shares the lock: it must end here, and the child's end must not end it here.
            if os.getpid() == self._pid:
                fcntl.flock(fd, fcntl.LOCK_UN)
            os.close(fd)

    def __enter__(self) -> Extent:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


AnyExtent: TypeAlias = Extent | MemoryExtent | LocalExtent


def trailer(data: Buffer) -> bytes:
    """Return what follows `data` in its cache file."""
    return _TRAILER.pack(_MAGIC, len(data), xxhash.xxh3_64_intdigest(data))


def intact(fd: int, length: int) -> bool:
    """Return whether an open cache file holds `length` bytes and the checksum that was written with them."""
    try:
        magic, said, checksum = _TRAILER.unpack(pread(fd, TRAILER_BYTES, length))
        if magic != _MAGIC or said != length:
            return False
        digest = xxhash.xxh3_64()
        # Not by mmap: a disk that fails, or a file cut short meanwhile, would kill the process.
        for start in range(0, length, _CHECKED_AT_ONCE):
            digest.update(pread(fd, min(_CHECKED_AT_ONCE, length - start), start))
        return bool(digest.intdigest() == checksum)
    except OSError:
        return False


def stamp(fd: int) -> int:
    """Note that an open cache file, known to be intact, is used now; return the time noted.

    It is a whole millisecond, which that of a write in place is not, but for one in a million.
    """
    now = time.time_ns()
    now -= now % _WHOLE_NS
    os.utime(fd, ns=(now, now))
    return now


def is_stamp(time_ns: int) -> bool:
    """Return whether a time of change is one that some process of the node has noted, so that none wrote since."""
    return time_ns % _WHOLE_NS == 0


def hold(fd: int) -> bool:
    """Keep an open cache file from eviction until it is closed; False where someone else has it for long."""
    for delay in _HOLD_TRIES:
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            time.sleep(delay)
    return False


def pread(fd: int, length: int, offset: int) -> bytes:
    """Return exactly `length` bytes of an open file. Raises OSError where it ends before."""
    body = os.pread(fd, length, offset)
    if len(body) == length:
        return body
    parts = [body]  # more than 2 GiB take more than one call
    got = len(body)
    while body and got < length:
        body = os.pread(fd, length - got, offset + got)
        parts.append(body)
        got += len(body)
    if got < length:
        raise OSError(f"the file ends after {offset + got} bytes, {offset + length} were asked for")
    return b"".join(parts)


def _pread_into(fd: int, part: memoryview, offset: int) -> None:
    """Fill `part` from an open file. Raises OSError where it ends before."""
    at = os.preadv(fd, [part], offset)
    if at < len(part):  # the end, or more than 2 GiB
        part[at:] = pread(fd, len(part) - at, offset + at)
