"""The node's disk cache: one file for each extent, shared by all processes without a daemon.

The temporary file of an extent is its lock and its reservation: whoever holds the lock fetches, others wait for the
published file. The kernel drops the lock of a process that dies, so nothing stays behind that could block.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import platformdirs
import xxhash

from bucketfeed.cache.extent import TRAILER_BYTES, AnyExtent, Extent, MemoryExtent, file_intact, trailer
from bucketfeed.cache.room import Room
from bucketfeed.errors import CacheError, ConfigError
from bucketfeed.store.ranges import Buffer, Range
from bucketfeed.store.sizes import format_size, parse_size

_log = logging.getLogger(__name__)

_WAIT_SECONDS = 150.0  # for another process's fetch: longer than all its retries together
_FIRST_POLL_SECONDS, _LONGEST_POLL_SECONDS = 0.001, 0.05
_TOUCH_NS = 1_000_000_000  # last use is noted no finer than this


@dataclass(frozen=True, slots=True)
class CacheStats:
    """What is in a cache folder: extents, their size in disk blocks (indexes included), limit, free disk."""

    files: int
    bytes_used: int
    limit_bytes: int
    free_bytes: int


class DiskCache:
    """A folder of extents that never takes more disk than its limit; the least recently used leave first.

    Args:
        folder: shared by all processes of the node and by later runs; the user's cache directory where None.
        limit_bytes: an int, or text such as "50GB"; half of the free disk where None.

    Raises: `CacheError` for a folder that can't be used, `ConfigError` for a limit that is none.

    >>> cache = bf.DiskCache("/mnt/nvme/cache", limit_bytes="200GB")
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None, limit_bytes: int | str | None = None) -> None:
        self.folder = Path(platformdirs.user_cache_dir("bucketfeed") if folder is None else folder).absolute()
        _prepare(self.folder)
        if limit_bytes is None:
            used = Room(self.folder, 0).used_bytes()
            limit_bytes = (shutil.disk_usage(self.folder).free + used) // 2
        self.limit_bytes = parse_size(limit_bytes, "limit_bytes")
        if self.limit_bytes < 1:
            raise ConfigError("limit_bytes must be at least 1; to read without a cache, pass cache=None")
        self._room = Room(self.folder, self.limit_bytes)
        self._verified: set[str] = set()
        self._warned = False

    @property
    def index_folder(self) -> Path:
        """Where manifests and indexes are kept; counted into the limit, never evicted."""
        return self.folder / "indexes"

    def get(self, range: Range, *, hold: bool = True) -> Extent | None:
        """Return the extent of exactly this range, or None where it is not here whole and undamaged.

        `hold` keeps it from eviction until it is closed.
        """
        if range.etag is None:
            return None
        return self._open(range, self._path(range), hold)

    def put(self, range: Range, data: Buffer) -> bool:
        """Keep `data` as the bytes of `range`; False where it is not kept (no version, no room, another writes it)."""
        with contextlib.ExitStack() as stack:
            claim = self.claim(range)
            if claim is None:
                return False
            stack.callback(claim.abandon)
            return isinstance(claim.publish(data), Extent)

    def get_or_fetch(self, range: Range, fetch: Callable[[], Buffer]) -> tuple[AnyExtent, bool]:
        """Return the extent of `range`, and whether it was here; fetched by one process of the node if not.

        The extent is in memory where it can't be kept. Errors of `fetch` pass through, and leave nothing behind.
        """
        extent = self.get(range)
        if extent is not None:
            return extent, True
        if not self.keeps(range):
            return MemoryExtent(range, fetch()), False
        end = time.monotonic() + _WAIT_SECONDS
        poll = _FIRST_POLL_SECONDS
        while (claim := self.claim(range)) is None:
            extent = self.get(range)
            if extent is not None:
                return extent, True
            if not self._writable():
                return MemoryExtent(range, fetch()), False
            if time.monotonic() > end:
                _log.warning("waited %.0f s for another process to fetch %s; fetching it too", _WAIT_SECONDS, range)
                return MemoryExtent(range, fetch()), False
            time.sleep(poll)
            poll = min(_LONGEST_POLL_SECONDS, poll * 1.5)
        try:
            extent = self.get(range)  # published between the look and the claim
            if extent is not None:
                return extent, True
            return claim.publish(fetch()), False
        finally:
            claim.abandon()

    def keeps(self, range: Range) -> bool:
        """Return whether an extent like this is cached at all: it has a version, and fits the limit."""
        return range.etag is not None and range.length + TRAILER_BYTES <= self.limit_bytes

    def claim(self, range: Range) -> Claim | None:
        """Return the right to write `range`, or None where another has it or it can't be written."""
        if not self.keeps(range):
            self._warn(f"{range} is larger than the whole cache")
            return None
        path = self._path(range)
        temporary = f"{path}.tmp"
        fd = -1
        try:
            fd = _create(temporary)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            linked = os.stat(temporary).st_ino == os.fstat(fd).st_ino
        except (BlockingIOError, FileNotFoundError):
            linked = False
        except OSError as e:
            self._warn(str(e))
            linked = False
        if not linked:  # another writes it, or has just published it
            if fd >= 0:
                os.close(fd)
            return None
        return Claim(self, range, fd, path)

    def stats(self) -> CacheStats:
        """Scan the folder and return what is in it."""
        used = self._room.recount()
        files = sum(not file.temporary for file in self._room.files())
        return CacheStats(files, used, self.limit_bytes, shutil.disk_usage(self.folder).free)

    def verify(self) -> int:
        """Check every extent's length and checksum, remove those that are damaged, and return how many were."""
        damaged = 0
        for file in self._room.files():
            if file.temporary:
                continue
            with contextlib.suppress(FileNotFoundError):
                fd = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    if not file_intact(fd):
                        os.unlink(file.path)
                        damaged += 1
                finally:
                    os.close(fd)
        self._room.recount()
        return damaged

    def clear(self) -> None:
        """Remove all extents and indexes; processes that read from them go on."""
        for file in self._room.files():
            with contextlib.suppress(FileNotFoundError):
                os.unlink(file.path)
        shutil.rmtree(self.index_folder, ignore_errors=True)
        self._verified.clear()
        self._room.recount()

    def _path(self, range: Range) -> str:
        name = xxhash.xxh3_128_hexdigest(
            b"\0".join((range.url.encode("utf-8", "surrogateescape"), str(range.etag).encode(), b"%d-%d" % range[1:3]))
        )
        return f"{self.folder}/extents/{name[:2]}/{name}"

    def _open(self, range: Range, path: str, hold: bool) -> Extent | None:
        try:
            extent = Extent(range, os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        except OSError:
            return None
        try:
            if path in self._verified:
                good = extent.whole()
            elif good := extent.intact():
                self._verified.add(path)
            good = good and (not hold or extent.hold())
            if good:
                extent.touch(_TOUCH_NS)
        except OSError as e:
            self._warn(str(e))
            good = False
        if not good:
            self._verified.discard(path)
            extent.close()
            return None
        return extent

    def _writable(self) -> bool:
        return os.access(self.folder, os.W_OK | os.X_OK)

    def _warn(self, why: str) -> None:
        if not self._warned:
            self._warned = True
            with contextlib.suppress(OSError):
                why += f"; {format_size(shutil.disk_usage(self.folder).free)} free on its disk"
            _log.warning(
                "the cache in %s (limit %s) can't keep what was fetched: %s. Reading goes on without it; "
                "change its folder or limit",
                self.folder,
                format_size(self.limit_bytes),
                why,
            )

    def __reduce__(self) -> tuple[type[DiskCache], tuple[str, int]]:
        return type(self), (str(self.folder), self.limit_bytes)

    def __repr__(self) -> str:
        used = format_size(self._room.used_bytes())
        return f"DiskCache({str(self.folder)!r}, limit={format_size(self.limit_bytes)}, used={used})"


class Claim:
    """The right of one process to write one extent: an open, locked temporary file."""

    def __init__(self, cache: DiskCache, range: Range, fd: int, path: str) -> None:
        self.range = range
        self._cache = cache
        self._fd = fd
        self._path = path

    def publish(self, data: Buffer) -> AnyExtent:
        """Make `data` the extent for all processes and return it, held; in memory where there is no room."""
        if len(data) != self.range.length:
            raise CacheError(f"{self.range} takes {self.range.length} bytes, not {len(data)}")
        try:
            os.ftruncate(self._fd, 0)  # of a process that died in the middle
            if not self._cache._room.reserve(self._fd, len(data) + TRAILER_BYTES):
                self._cache._warn("all that it holds is in use")
                return MemoryExtent(self.range, data)
            _write_all(self._fd, data, trailer(data))
            os.rename(f"{self._path}.tmp", self._path)
            fcntl.flock(self._fd, fcntl.LOCK_SH)  # from writer to holder, without a gap for an eviction
        except OSError as e:
            self._cache._warn("no space left on its disk" if e.errno in (errno.ENOSPC, errno.EDQUOT) else str(e))
            return MemoryExtent(self.range, data)
        self._cache._verified.add(self._path)
        fd, self._fd = self._fd, -1
        return Extent(self.range, fd)

    def abandon(self) -> None:
        """Give the right up; does nothing after `publish` has succeeded."""
        if self._fd < 0:
            return
        with contextlib.suppress(OSError):
            used = os.fstat(self._fd).st_blocks * 512
            os.unlink(f"{self._path}.tmp")
            if used:
                self._cache._room.free(used)
        os.close(self._fd)
        self._fd = -1


def _create(path: str) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        return os.open(path, flags, 0o600)
    except FileNotFoundError:
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        return os.open(path, flags, 0o600)


def _write_all(fd: int, *parts: Buffer) -> None:
    offset = 0
    for part in parts:
        view = memoryview(part).cast("B") if len(part) else memoryview(b"")
        while view:
            written = os.pwrite(fd, view, offset)
            view, offset = view[written:], offset + written


def _prepare(folder: Path) -> None:
    advice = "choose another folder for the cache"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        (folder / "indexes").mkdir(mode=0o700, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as e:
        raise CacheError(f"the cache folder {folder} is a file, or lies under one; {advice}") from e
    except OSError as e:
        raise CacheError(f"the cache folder {folder} can't be made: {e}; {advice}") from e
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        owner = folder.stat().st_uid
        raise CacheError(
            f"the cache folder {folder} belongs to user {owner} and may not be written by user {os.geteuid()}; {advice}"
        )
