"""The node's disk cache: one file for each extent, shared by all processes without a daemon."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import platformdirs
import xxhash

from bucketfeed.cache import passes
from bucketfeed.cache.claim import Claim, take_claim
from bucketfeed.cache.extent import TRAILER_BYTES, AnyExtent, Extent, MemoryExtent, hold, intact, is_stamp, stamp
from bucketfeed.cache.room import Room
from bucketfeed.errors import CacheError, ConfigError
from bucketfeed.store.ranges import Buffer, Range
from bucketfeed.store.sizes import format_size, parse_size

_log = logging.getLogger(__name__)

_WAIT_SECONDS = 150.0  # for another process's fetch: longer than all its retries together
_FIRST_POLL_SECONDS, _LONGEST_POLL_SECONDS = 0.001, 0.05
_TOUCH_NS = 1_000_000_000  # last use is noted no finer than this
_KEPT_FREE = 5 << 30  # a small cloud disk that is full takes the whole machine down
_MAX_VERIFIED = 1 << 16  # names of files: bounds what they take in memory to about 20 MB


@dataclass(frozen=True, slots=True)
class CacheStats:
    """What is in a cache folder: extents, their size in disk blocks (indexes included), limit, free disk."""

    files: int
    bytes_used: int
    limit_bytes: int
    free_bytes: int


def default_limit(folder: Path) -> int:
    """Return the bytes that a cache in the existing `folder` may take unless told otherwise.

    Half of what is free, what the cache has already counted in, but so that 5 GiB stay free; a tenth on a disk that
    has hardly more.
    """
    free = shutil.disk_usage(folder).free + Room(folder, 0).noted_bytes()
    return max(min(free // 2, free - _KEPT_FREE), free // 10)


class DiskCache:
    """A folder of extents that never takes more disk than its limit; those that nobody uses any more leave first.

    Args:
        folder: shared by all processes of the node and by later runs; the user's cache directory where None.
        limit_bytes: an int, or text such as "50GB"; `default_limit` where None, told in the log.

    Raises: `CacheError` for a folder that can't be used, `ConfigError` for a limit that is none.

    >>> cache = bf.DiskCache("/mnt/nvme/cache", limit_bytes="200GB")
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None, limit_bytes: int | str | None = None) -> None:
        self.folder = Path(platformdirs.user_cache_dir("bucketfeed") if folder is None else folder).absolute()
        _prepare(self.folder)
        if limit_bytes is None:
            limit_bytes = default_limit(self.folder)
            free = format_size(shutil.disk_usage(self.folder).free)
            _log.info("cache in %s: at most %s, of %s free on its disk", self.folder, format_size(limit_bytes), free)
        self.limit_bytes = parse_size(limit_bytes, "limit_bytes")
        if self.limit_bytes < 1:
            raise ConfigError(
                f"limit_bytes is {limit_bytes!r}, it must be at least 1; to read without a cache: cache=None"
            )
        self._room = Room(self.folder, self.limit_bytes)
        self._verified: dict[str, tuple[int, int]] = {}  # of a path: inode and time of change of the file found intact
        self._warned = False

    @property
    def index_folder(self) -> Path:
        """Where manifests and indexes are kept; counted into the limit, never evicted."""
        return self.folder / "indexes"

    def get(self, range: Range, *, held: bool = True, sized: bool = True) -> Extent | None:
        """Return the extent of exactly this range, or None where it is not here whole and undamaged.

        `held` keeps it from eviction until it is closed; without, only what is read of it stays. Without `sized` it may
        hold more or fewer bytes than the range is long: what was made of them.
        """
        if range.etag is None:
            return None
        return self._open(range, self._path(range), held, sized)

    def put(self, range: Range, data: Buffer, *, sized: bool = True) -> bool:
        """Keep `data` as the bytes of `range`; False where it is not kept (no version, no room, another writes it).

        Without `sized` it is what was made of them, of any length.
        """
        claim = self._claim(range)
        if claim is None:
            return False
        try:
            with claim.publish(data, sized=sized) as extent:
                return isinstance(extent, Extent)
        finally:
            claim.abandon()

    def get_or_fetch(self, range: Range, fetch: Callable[[], Buffer]) -> AnyExtent:
        """Return the extent of `range`, fetched by one process of the node if it is not here.

        It is in memory where it can't be kept. Errors of `fetch` pass through, and leave nothing behind.
        """
        extent = self.get(range)
        return extent if extent is not None else self.fetch([range], lambda _: [fetch()])[0]

    def fetch(self, ranges: Sequence[Range], fetch: Callable[[list[Range]], Sequence[Buffer]]) -> list[AnyExtent]:
        """Return the extents of `ranges`: `fetch` gets those, each once, that no other process has fetched or does.

        A range that is asked for twice is one extent, which is closed for both.
        Nobody waits while it holds a claim, so two calls can't wait for each other.
        """
        found: dict[Range, AnyExtent] = {}
        pending = list(dict.fromkeys(ranges))
        patience = _Patience(pending[0]) if pending else None
        try:
            while pending:
                fetched = self._fetch_unclaimed(pending, found, fetch)
                pending = [range for range in pending if range not in found]
                if pending and not fetched and patience is not None and not patience.wait():
                    bodies = fetch(pending)
                    found.update((r, MemoryExtent(r, body)) for r, body in zip(pending, bodies, strict=True))
                    pending = []
        except BaseException:
            for extent in found.values():
                extent.close()
            raise
        return [found[range] for range in ranges]

    def indexed(self) -> None:
        """Say that files in `index_folder` have grown: what fits no more beside them is evicted."""
        with contextlib.suppress(OSError):  # a folder gone read-only: nothing grows in it
            self._room.shrink()

    def begin_pass(self, data: str, name: str) -> None:
        """Say that pass `name` (one per epoch) over `data` begins, each of whose extents is used about once.

        From now on this process evicts only what nobody has used since the pass before began, oldest first; what does
        not fit is read and not kept. Without passes the least recently used leave first.

        Args:
            data: a name for the data set that can be part of a file name, the same in all processes: its fingerprint.
            name: the same in all processes and in a run that is resumed, another one for each epoch.
        """
        with contextlib.suppress(OSError):  # a folder gone read-only: nothing will be kept in it anyway
            self._room.spare(passes.begin(self.index_folder / f"{data}.pass", name) - _TOUCH_NS)
            self._room.shrink()

    def stats(self) -> CacheStats:
        """Scan the folder and return what is in it: nothing where it was removed, until something is kept again."""
        used = self._room.recount()
        files = sum(not file.temporary for file in self._room.files())
        there = next(path for path in (self.folder, *self.folder.parents) if path.exists())
        return CacheStats(files, used, self.limit_bytes, shutil.disk_usage(there).free)

    def verify(self) -> int:
        """Check every extent's length and checksum, remove those that are damaged, and return how many were."""
        damaged = 0
        for file in self._room.files():
            if file.temporary:
                continue
            with contextlib.suppress(FileNotFoundError):
                fd = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    if not intact(fd, os.fstat(fd).st_size - TRAILER_BYTES):
                        os.unlink(file.path)
                        damaged += 1
                finally:
                    os.close(fd)
        self._verified.clear()
        self._room.recount()
        return damaged

    def clear(self) -> None:
        """Remove all extents, manifests and indexes; whoever has one open goes on reading it."""
        for file in self._room.files():
            if not file.temporary:
                Path(file.path).unlink(missing_ok=True)
        for pattern in ("*.manifest", "*.idx", "*.pass"):
            for path in self.index_folder.glob(pattern):
                path.unlink(missing_ok=True)
        self._verified.clear()
        self._room.recount()

    def _claim(self, range: Range) -> Claim | None:
        if range.etag is None:
            return Claim(range, "", self._room, self._warn)
        if range.length + TRAILER_BYTES > self.limit_bytes:
            self._warn(f"{range} is larger than the limit")
            return Claim(range, "", self._room, self._warn)
        return take_claim(range, self._path(range), self._room, self._warn)

    def _fetch_unclaimed(
        self,
        pending: list[Range],
        found: dict[Range, AnyExtent],
        fetch: Callable[[list[Range]], Sequence[Buffer]],
    ) -> bool:
        """Add to `found` what is here by now and what could be claimed and fetched; True where something was."""
        claims: dict[Range, Claim] = {}
        before = len(found)
        try:
            for range in pending:
                claim = self._claim(range)
                extent = self.get(range)  # after the claim: published between the last look and the claim
                if extent is not None:
                    found[range] = extent
                if claim is not None and extent is not None:
                    claim.abandon()
                elif claim is not None:
                    claims[range] = claim
            if claims:
                for claim, body in zip(claims.values(), fetch(list(claims)), strict=True):
                    published = found[claim.range] = claim.publish(body)
                    if isinstance(published, Extent):
                        self._remember(published.path, published.inode)
        finally:
            for claim in claims.values():
                claim.abandon()
        return len(found) > before

    def _path(self, range: Range) -> str:
        url, start, stop, etag = range
        name = xxhash.xxh3_128_hexdigest(f"{url}\0{etag}\0{start}-{stop}".encode("utf-8", "surrogateescape"))
        return f"{self.folder}/extents/{name[0]}/{name}"

    def _open(self, range: Range, path: str, held: bool, sized: bool) -> Extent | None:
        try:
            extent = Extent(range, fd := os.open(path, os.O_RDONLY | os.O_CLOEXEC), path)
        except OSError:
            return None
        try:
            if held and not hold(fd):
                raise _Unusable
            status = os.fstat(fd)
            if not status.st_nlink:  # evicted before it was held
                raise _Unusable
            length = range.length if sized else max(0, status.st_size - TRAILER_BYTES)
            whole = status.st_size == length + TRAILER_BYTES
            known = self._is_known(path, status)
            if not whole or (not known and not intact(fd, length)):
                _log.info("the cache file %s of %s is damaged; fetching it again", path, range)
                self._verified.pop(path, None)
                os.unlink(path)
                raise _Unusable
            if not known or abs(time.time_ns() - status.st_mtime_ns) > _TOUCH_NS:
                seen = status.st_mtime_ns
                with contextlib.suppress(OSError):  # another user's file in a shared folder, or a read-only one
                    seen = stamp(fd)
                self._remember(path, status.st_ino, seen)
        except (_Unusable, OSError):
            extent.close()
            return None
        return extent

    def _is_known(self, path: str, status: os.stat_result) -> bool:
        """Return whether the file was found intact, and nobody has written to it since."""
        inode, seen = self._verified.get(path, (0, 0))
        return inode == status.st_ino and (seen == status.st_mtime_ns or is_stamp(status.st_mtime_ns))

    def _remember(self, path: str, inode: int, seen: int = 0) -> None:
        if len(self._verified) >= _MAX_VERIFIED:
            self._verified.clear()
        self._verified[path] = (inode, seen)

    def _warn(self, why: str) -> None:
        if self._warned:
            return
        self._warned = True
        try:
            free = format_size(shutil.disk_usage(self.folder).free)
        except OSError as e:
            free = str(e)
        _log.warning(
            "the cache in %s can't keep what was fetched: %s (limit %s, free on its disk: %s). Reading goes on without "
            "it; change its folder or limit_bytes",
            self.folder,
            why,
            format_size(self.limit_bytes),
            free,
        )

    def __reduce__(self) -> tuple[type[DiskCache], tuple[str, int]]:
        return type(self), (str(self.folder), self.limit_bytes)

    def __repr__(self) -> str:
        used = format_size(self._room.noted_bytes())
        return f"DiskCache({str(self.folder)!r}, limit={format_size(self.limit_bytes)}, used={used})"


class _Unusable(Exception):
    """A cache file that can't serve."""


class _Patience:
    """Waits for another process, a little longer each time, within bounds."""

    def __init__(self, range: Range) -> None:
        self._range = range
        self._end = time.monotonic() + _WAIT_SECONDS
        self._pause = _FIRST_POLL_SECONDS

    def wait(self) -> bool:
        """Pause; False, with a warning, once that has taken too long."""
        if time.monotonic() > self._end:
            _log.warning("waited %.0f s for another process to fetch %s; fetching it too", _WAIT_SECONDS, self._range)
            return False
        time.sleep(self._pause)
        self._pause = min(_LONGEST_POLL_SECONDS, self._pause * 1.5)
        return True


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
