"""Keeps a cache folder within its limit: reservations before writing, eviction of what was used longest ago."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_FOLDER = re.compile(r"[0-9a-f]")
_FILE = re.compile(r"[0-9a-f]{32}(\.tmp)?")
_BLOCK = 4096
_OWN_BYTES = 3 * _BLOCK  # the folder itself, the one of the indexes, and the ledger
_LEAST_BYTES = _OWN_BYTES + (1 + 16) * _BLOCK  # and those of the extents, counted before they are made
_SLACK = 64  # an eviction frees this part of the limit at once, so that not every write has to scan
_FULL_SECONDS = 30.0
_LOCK_TRIES = 10
_FULL = (errno.ENOSPC, errno.EDQUOT)
_NO_PREALLOCATION = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)


@dataclass(frozen=True, slots=True)
class CacheFile:
    """A file of ours, with its size in disk blocks and its time of last use."""

    path: str
    used_bytes: int
    used_at_ns: int

    @property
    def temporary(self) -> bool:
        """Whether it was never published: being written, or left by a process that died."""
        return self.path.endswith(".tmp")


class Room:
    """The space of a cache folder, shared by all processes through a lock on its ledger.

    The ledger holds the sum of bytes used, so that a write need not scan the folder. It may say too much, after a
    crash or when files were removed, never too little; each eviction scans and writes down the truth.
    """

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self._extents = folder / "extents"
        self._indexes = folder / "indexes"
        self._ledger = folder / "ledger"
        self._limit = limit_bytes
        self._spared_since_ns: int | None = None
        self._full_until = 0.0

    def spare(self, since_ns: int) -> None:
        """From now on evict only what was used before `since_ns`."""
        if since_ns != self._spared_since_ns:
            self._spared_since_ns, self._full_until = since_ns, 0.0

    @property
    def spares(self) -> bool:
        """Whether some extents are not evicted although nobody holds them."""
        return self._spared_since_ns is not None

    def reserve(self, fd: int, length: int) -> bool:
        """Give the open file `length` bytes of disk, evicting others for it.

        False where all that could be evicted is in use or spared. Raises OSError where the disk has no room although
        others were evicted (ENOSPC, EDQUOT).
        """
        need = _blocks(length) + _BLOCK  # one more: the name may need a new block of its folder
        limit = self._limit - self._index_bytes()
        with locked(self._ledger) as ledger:
            used = _noted(ledger)
            if used is None or used + need > limit:
                if time.monotonic() < self._full_until:
                    return False
                used = self._evict(limit, need)
            if used + need > limit:
                _note(ledger, used)
                if self.spares:  # and will for long: don't scan for each extent that passes through
                    self._full_until = time.monotonic() + _FULL_SECONDS
                return False
            try:
                _note(ledger, used + need)  # first: who dies after this line has noted too much
                _allocate(fd, length)
            except OSError as e:
                if e.errno not in _FULL:
                    raise
                # The disk is smaller than the limit, or others have filled it: this extent for older ones.
                os.ftruncate(fd, 0)
                used = self._evict(used, need)
                _note(ledger, used + need)
                _allocate(fd, length)
        return True

    def shrink(self) -> None:
        """Evict what fits no more since manifests and indexes have grown."""
        limit = self._limit - self._index_bytes()
        with locked(self._ledger) as ledger:
            used = _noted(ledger)
            if used is None or used > limit:
                _note(ledger, self._evict(limit, 0))

    def rename(self, fd: int, old: str, new: str) -> None:
        """Rename an open file that has a reservation; a scan at the same time could miss it under both names."""
        with locked(self._ledger):
            if not is_at(fd, old):  # by hand; what has the name now is another's, and half written
                raise FileNotFoundError(errno.ENOENT, "removed while it was written", old)
            os.rename(old, new)

    def give_back(self, fd: int, path: str) -> None:
        """Remove the open file at `path`, and its bytes from those used."""
        with locked(self._ledger) as ledger:  # around both: a scan in between would count it gone, then again
            used = _noted(ledger)
            if not is_at(fd, path):
                return  # by hand: counted no more, or noted until the next scan
            os.unlink(path)
            if used is not None:
                _note(ledger, max(0, used - _used_bytes(os.fstat(fd))))

    def noted_bytes(self) -> int:
        """Return the bytes used as far as noted, without a scan and without waiting for anyone."""
        with contextlib.suppress(OSError):
            fd = os.open(self._ledger, os.O_RDONLY | os.O_CLOEXEC)
            try:
                return (_noted(fd) or 0) + self._index_bytes()
            finally:
                os.close(fd)
        return self._index_bytes()

    def recount(self) -> int:
        """Scan, drop what dead processes left, write down and return the bytes used; 0 where the folder was removed."""
        try:
            with locked(self._ledger) as ledger:
                used = sum(file.used_bytes for file in self._living()) + self._folder_bytes()
                _note(ledger, used)
        except (FileNotFoundError, NotADirectoryError):
            return 0
        return used + self._index_bytes()

    def files(self) -> Iterator[CacheFile]:
        """Yield every file of ours that holds, or is to hold, an extent. Others' files are passed over."""
        for folder in self._folders():
            for entry in _entries(folder.path):
                if _FILE.fullmatch(entry.name):
                    with contextlib.suppress(FileNotFoundError):
                        status = entry.stat(follow_symlinks=False)
                        yield CacheFile(entry.path, _used_bytes(status), _used_at_ns(entry.path, status))

    def _evict(self, limit: int, need: int) -> int:
        """Remove the files used longest ago until `need` fits, and some more; return the bytes used then."""
        living = list(self._living())
        used = sum(file.used_bytes for file in living) + self._folder_bytes()
        if used + need <= limit:
            return used  # the ledger said too much
        target = limit - limit // _SLACK - need
        for file in sorted((f for f in living if not f.temporary), key=lambda f: f.used_at_ns):
            if used <= target or (self._spared_since_ns is not None and file.used_at_ns >= self._spared_since_ns):
                break
            if remove_unused(file.path):
                used -= file.used_bytes
        return used

    def _living(self) -> Iterator[CacheFile]:
        for file in self.files():
            if not (file.temporary and remove_unused(file.path)):
                yield file

    def _folders(self) -> Iterator[os.DirEntry[str]]:
        return (entry for entry in _entries(self._extents) if _FOLDER.fullmatch(entry.name))

    def _folder_bytes(self) -> int:
        used = _OWN_BYTES
        for folder in (str(self._extents), *(entry.path for entry in self._folders())):
            with contextlib.suppress(FileNotFoundError):
                used += os.stat(folder).st_blocks * 512
        return max(used, _LEAST_BYTES)

    def _index_bytes(self) -> int:
        used = 0
        for entry in _entries(self._indexes):
            with contextlib.suppress(FileNotFoundError):
                used += entry.stat(follow_symlinks=False).st_blocks * 512
        return used


def remove_unused(path: str) -> bool:
    """Remove a file unless some process holds it; True when it is gone."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)  # NFS locks need a file open for writing
    except FileNotFoundError:
        return True
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if is_at(fd, path):
            os.unlink(path)
            return True
        return not os.path.lexists(path)  # published or replaced since it was opened
    except FileNotFoundError:
        return True
    except OSError:  # in use, or the folder was made read-only
        return False
    finally:
        unlock_and_close(fd)


def is_at(fd: int, path: str | Path) -> bool:
    """Return whether `path` is still the name of an open file."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False


def unlock_and_close(fd: int) -> None:
    """Give up the lock on an open file: to close it would not do, if a child was forked meanwhile."""
    open_locks.discard(fd)
    with contextlib.suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)


# Files of this process that it locks to write. A lock is shared with a child forked while it was held; should its
# holder die, the child would keep it for ever.
open_locks: set[int] = set()


def _drop_inherited() -> None:
    for fd in open_locks:
        with contextlib.suppress(OSError):
            os.close(fd)
    open_locks.clear()


os.register_at_fork(after_in_child=_drop_inherited)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[int]:
    """Open a small file under its lock: held for a scan at most, dropped by the kernel when its holder dies."""
    fd = _lock(path)
    try:
        yield fd
    finally:
        unlock_and_close(fd)


def _lock(path: Path) -> int:
    for attempt in range(1, _LOCK_TRIES + 1):
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        open_locks.add(fd)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            if is_at(fd, path) or attempt == _LOCK_TRIES:
                break
        except BaseException:
            unlock_and_close(fd)
            raise
        unlock_and_close(fd)  # removed by hand during the wait: others lock another file by now
    return fd


def _noted(ledger: int) -> int | None:
    text = os.pread(ledger, 32, 0)
    return int(text) if len(text) == 32 and text.isdigit() else None


def _note(ledger: int, used: int) -> None:
    os.pwrite(ledger, b"%032d" % used, 0)


def _allocate(fd: int, length: int) -> None:
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(fd, 0, length)
            return
        except OSError as e:
            if e.errno not in _NO_PREALLOCATION:
                raise
    os.ftruncate(fd, length)  # the limit holds by the ledger alone


def _used_bytes(status: os.stat_result) -> int:
    # A file being written without preallocation has its length before its blocks.
    return max(status.st_blocks * 512, _blocks(status.st_size))


def _used_at_ns(path: str, status: os.stat_result) -> int:
    """Return the time of last use. One to come, of a clock set back or another's touch, is put right for good."""
    now = time.time_ns()
    if status.st_mtime_ns <= now:
        return status.st_mtime_ns
    used_at = min(status.st_ctime_ns, now)
    with contextlib.suppress(OSError):
        os.utime(path, ns=(used_at, used_at), follow_symlinks=False)
    return used_at


def _blocks(length: int) -> int:
    return -(-length // _BLOCK) * _BLOCK


def _entries(folder: str | Path) -> Iterator[os.DirEntry[str]]:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
        yield from entries
