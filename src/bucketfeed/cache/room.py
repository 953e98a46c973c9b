"""Keeps a cache folder within its limit: reservations before writing, eviction of what was used longest ago."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_OURS = re.compile(r"[0-9a-f]{32}(\.tmp)?")
_BLOCK = 4096
_SLACK = 20  # an eviction frees this part of the limit at once, so that not every write has to scan
_SLACK_BYTES = 256 << 20


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

    The ledger holds the sum of bytes used, so that a write need not scan the folder. It may say too much (after a
    crash), never too little; each eviction scans and writes down the truth.
    """

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self._extents = folder / "extents"
        self._indexes = folder / "indexes"
        self._ledger = folder / "ledger"
        self._limit = limit_bytes

    def reserve(self, fd: int, length: int) -> bool:
        """Give the open file `length` bytes of disk, evicting others for it; False where there is no room.

        Raises OSError where the disk itself has no room (ENOSPC, EDQUOT).
        """
        need = -(-length // _BLOCK) * _BLOCK
        with self._locked() as ledger:
            used = self._used(ledger)
            if used + need > self._limit:
                used = self._make_room(need)
            if used + need > self._limit:
                self._write(ledger, used)
                return False
            # Written down first: killed after this line, the ledger says too much, which the next scan mends.
            self._write(ledger, used + need)
            try:
                os.posix_fallocate(fd, 0, length)
            except OSError:
                self._write(ledger, used)
                raise
        return True

    def free(self, used_bytes: int) -> None:
        """Note that `used_bytes` of ours were removed."""
        with self._locked() as ledger:
            self._write(ledger, max(0, self._used(ledger) - used_bytes))

    def used_bytes(self) -> int:
        """Return the bytes used according to the ledger."""
        with self._locked() as ledger:
            return self._used(ledger)

    def recount(self) -> int:
        """Scan, drop what dead processes left, write down and return the bytes used."""
        with self._locked() as ledger:
            used = sum(file.used_bytes for file in self._living())
            self._write(ledger, used)
            return used + self._index_bytes()

    def files(self) -> Iterator[CacheFile]:
        """Yield every file of ours that holds, or is to hold, an extent. Others' files are passed over."""
        for folder in _entries(self._extents):
            if len(folder.name) != 2:
                continue
            for entry in _entries(folder.path):
                if _OURS.fullmatch(entry.name):
                    with contextlib.suppress(FileNotFoundError):
                        status = entry.stat(follow_symlinks=False)
                        yield CacheFile(entry.path, status.st_blocks * 512, status.st_mtime_ns)

    def _make_room(self, need: int) -> int:
        living = list(self._living())
        used = sum(file.used_bytes for file in living) + self._index_bytes()
        target = self._limit - min(self._limit // _SLACK, _SLACK_BYTES)
        for file in sorted((f for f in living if not f.temporary), key=lambda f: f.used_at_ns):
            if used + need <= target:
                break
            if _remove_unused(file.path):
                used -= file.used_bytes
        return used

    def _living(self) -> Iterator[CacheFile]:
        for file in self.files():
            if not (file.temporary and _remove_unused(file.path)):
                yield file

    def _index_bytes(self) -> int:
        return sum(entry.stat().st_blocks * 512 for entry in _entries(self._indexes))

    @contextlib.contextmanager
    def _locked(self) -> Iterator[int]:
        fd = os.open(self._ledger, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)  # held for a scan at most, and dropped by the kernel when its holder dies
            yield fd
        finally:
            os.close(fd)

    def _used(self, ledger: int) -> int:
        text = os.pread(ledger, 32, 0)
        extents = int(text) if text.isdigit() else sum(file.used_bytes for file in self._living())
        return extents + self._index_bytes()

    def _write(self, ledger: int, used: int) -> None:
        text = b"%032d" % max(0, used - self._index_bytes())
        os.pwrite(ledger, text, 0)


def _entries(folder: str | Path) -> Iterator[os.DirEntry[str]]:
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
        yield from entries


def _remove_unused(path: str) -> bool:
    """Remove a file unless some process holds it; True when it is gone."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(path)
    except FileNotFoundError:
        return True
    except OSError:  # in use, or the folder was made read-only
        return False
    finally:
        os.close(fd)
    return True
