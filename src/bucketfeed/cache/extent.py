"""What a read may come from: an extent in a cache file, or one in memory."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import struct
import time
from typing import TypeAlias

import xxhash

from bucketfeed.store.local import LocalExtent
from bucketfeed.store.ranges import Buffer, Range

# At the end of a cache file, so that the payload starts at a page: magic, length of the payload, its xxh3.
_TRAILER = struct.Struct("<8sQQ")
_MAGIC = b"bfextnt1"
TRAILER_BYTES = _TRAILER.size


class MemoryExtent:
    """A range whose bytes are held in memory."""

    def __init__(self, range: Range, data: Buffer) -> None:
        self.range = range
        self._data = memoryview(data)

    def read(self, start: int, stop: int) -> bytes:
        """Return bytes `start` to `stop` of the object; they lie inside the range."""
        return bytes(self._data[start - self.range.start : stop - self.range.start])

    def close(self) -> None:
        """Let the bytes go."""
        self._data = memoryview(b"")

    def __enter__(self) -> MemoryExtent:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Extent:
    """A range in an open cache file, which stays readable until `close` even if it is evicted meanwhile."""

    def __init__(self, range: Range, fd: int) -> None:
        self.range = range
        self._fd = fd

    def read(self, start: int, stop: int) -> bytes:
        """Return bytes `start` to `stop` of the object; they lie inside the range."""
        return os.pread(self._fd, stop - start, start - self.range.start)

    def intact(self) -> bool:
        """Return whether length and checksum are those that were written."""
        return self.whole() and _intact(self._fd, self.range.length)

    def whole(self) -> bool:
        """Return whether the file has the length that it should have."""
        return os.fstat(self._fd).st_size == self.range.length + TRAILER_BYTES

    def hold(self) -> bool:
        """Keep the file from being evicted until `close`; False where it has gone already."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return os.fstat(self._fd).st_nlink > 0

    def touch(self, resolution_ns: int) -> None:
        """Note that the file is used now, unless that was noted less than `resolution_ns` ago."""
        now = time.time_ns()
        if now - os.fstat(self._fd).st_mtime_ns > resolution_ns:
            with contextlib.suppress(PermissionError):  # another user's file in a shared folder, or read-only
                os.utime(self._fd, ns=(now, now))

    def close(self) -> None:
        """Close the file."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
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


def file_intact(fd: int) -> bool:
    """Return whether an open cache file is what was once written, whatever its range."""
    length = os.fstat(fd).st_size - TRAILER_BYTES
    return length >= 0 and _intact(fd, length)


def _intact(fd: int, length: int) -> bool:
    magic, said, digest = _TRAILER.unpack(os.pread(fd, TRAILER_BYTES, length))
    if magic != _MAGIC or said != length:
        return False
    if not length:
        return bool(digest == xxhash.xxh3_64_intdigest(b""))
    with mmap.mmap(fd, length, prot=mmap.PROT_READ) as content:
        return bool(digest == xxhash.xxh3_64_intdigest(content))
