"""The right of one process of the node to write one extent: an open temporary file under a lock.

The file is the lock and the reservation in one. Others wait for the published file; the kernel drops the lock of a
process that dies, and the next one goes on with the same file.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Callable

from bucketfeed.cache.extent import TRAILER_BYTES, AnyExtent, Extent, MemoryExtent, stamp, trailer
from bucketfeed.cache.room import Room, is_at, open_locks, unlock_and_close
from bucketfeed.errors import CacheError
from bucketfeed.store.ranges import Buffer, Range


class Claim:
    """The right to write the extent of `range` to `path`, until `publish` or `abandon`.

    Without a locked temporary file (`fd`), what is published stays in memory.
    """

    def __init__(self, range: Range, path: str, room: Room, warn: Callable[[str], None], fd: int = -1) -> None:
        self.range = range
        self._path = path
        self._room = room
        self._warn = warn
        self._fd = fd

    def publish(self, data: Buffer, *, sized: bool = True) -> AnyExtent:
        """Make `data` the extent for all processes and return it, held; in memory where it can't be kept."""
        if sized and len(data) != self.range.length:
            raise CacheError(f"{self.range} takes {self.range.length} bytes, not {len(data)}; the reader gave too many")
        if self._fd < 0:
            return MemoryExtent(self.range, data)
        try:
            os.ftruncate(self._fd, 0)  # of a process that died in the middle
            if not self._room.reserve(self._fd, len(data) + TRAILER_BYTES):
                if not self._room.spares:
                    self._warn("all that could make room for it is in use")
                return MemoryExtent(self.range, data)
            _write_all(self._fd, data, trailer(data))
            stamp(self._fd)
            self._room.rename(self._fd, _temporary(self._path), self._path)
        except OSError as e:
            self._warn("no space is left on its disk" if e.errno in (errno.ENOSPC, errno.EDQUOT) else str(e))
            return MemoryExtent(self.range, data)
        fd, self._fd = self._fd, -1
        open_locks.discard(fd)
        with contextlib.suppress(OSError):  # without it the file may be evicted; it stays readable
            fcntl.flock(fd, fcntl.LOCK_SH)
        return Extent(self.range, fd, self._path)

    def abandon(self) -> None:
        """Give the right up; does nothing after `publish` has made a file."""
        fd, self._fd = self._fd, -1
        if fd < 0:
            return
        with contextlib.suppress(OSError):
            self._room.give_back(fd, _temporary(self._path))
        unlock_and_close(fd)


def take_claim(range: Range, path: str, room: Room, warn: Callable[[str], None]) -> Claim | None:
    """Return the right to write `range` to `path`, or None while another has it."""
    try:
        fd = _create(_temporary(path))
    except OSError as e:
        warn(str(e))
        return Claim(range, path, room, warn)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if is_at(fd, _temporary(path)):
            return Claim(range, path, room, warn, fd)
    except BlockingIOError:
        pass
    except OSError as e:
        unlock_and_close(fd)
        warn(str(e))
        return Claim(range, path, room, warn)
    unlock_and_close(fd)  # another has it, or has published it since it was opened
    return None


def _temporary(path: str) -> str:
    return f"{path}.tmp"


def _create(path: str) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        fd = os.open(path, flags, 0o600)
    except FileNotFoundError:
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        fd = os.open(path, flags, 0o600)
    open_locks.add(fd)
    return fd


def _write_all(fd: int, *parts: Buffer) -> None:
    offset = 0
    for part in parts:
        view = memoryview(part).cast("B") if len(part) else memoryview(b"")
        while view:
            written = os.pwrite(fd, view, offset)
            view, offset = view[written:], offset + written
