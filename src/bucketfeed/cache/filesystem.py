"""The node's disk cache as an fsspec file system, so that pandas, pyarrow, PIL and others read through it.

>>> pd.read_parquet("nodecache::s3://bucket/table.parquet", storage_options={"nodecache": {"limit": "50GB"}})
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import os
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from fsspec.implementations.chained import ChainedFileSystem
from fsspec.spec import AbstractBufferedFile

from bucketfeed.cache.disk import DiskCache
from bucketfeed.cache.reader import CachedReader
from bucketfeed.errors import ConfigError
from bucketfeed.store.fsspec import FsspecReader, open_filesystem, version_token
from bucketfeed.store.local import LocalReader, file_version
from bucketfeed.store.process import PerProcess
from bucketfeed.store.ranges import Counter, Range
from bucketfeed.store.urls import parse_url

EXTENT_BYTES = 4 << 20
_EXTENTS_AT_ONCE = 32
_READ_AHEAD_BYTES = 64 << 10  # of a file that is read in small pieces

# Options that say where a file is and are no part of its URL: what the cache calls it would not be unique.
_PLACES = {"fo", "fs", "host", "path", "target_protocol"}


class _Version(NamedTuple):
    """One version of a file, as it was when it was opened."""

    url: str
    size: int
    etag: str

    def part(self, start: int | None, stop: int | None) -> _Part:
        """Return bytes `start` to `stop`, with ends as in a slice."""
        first, last, _ = slice(start, stop).indices(self.size)
        return _Part(self, first, max(first, last))


class _Part(NamedTuple):
    """Bytes `start` to `stop` of a version of a file."""

    version: _Version
    start: int
    stop: int

    def extents(self) -> list[Range]:
        """Return the extents of the grid that cover it."""
        url, size, etag = self.version
        first = self.start - self.start % EXTENT_BYTES
        return [Range(url, at, min(size, at + EXTENT_BYTES), etag) for at in range(first, self.stop, EXTENT_BYTES)]


class NodeCacheFileSystem(ChainedFileSystem):  # type: ignore[misc]
    """Reads the files of another file system through a `DiskCache`, in extents on a fixed grid of 4 MiB.

    A file's version is looked up whenever it is opened and holds until it is closed: a file replaced meanwhile is an
    `ObjectChangedError`, never a mixture. Files without version or size, and those whose URL alone does not name them
    (inside archives, on hosts given as options), are read without the cache. Listing and information come from the
    other file system. It only reads.

    Args:
        target_protocol: the other file system's, e.g. "s3"; set by fsspec for "nodecache::s3://...".
        target_options: the other file system's options.
        fs: the other file system itself, instead of both; a new one like it is made.
        folder: of the cache, see `DiskCache`.
        limit: of the cache, in bytes or as text such as "50GB".
    """

    protocol: ClassVar[str] = "nodecache"
    _strip_tokenize_options = ("fo",)

    def __init__(
        self,
        target_protocol: str | None = None,
        target_options: Mapping[str, Any] | None = None,
        fs: Any = None,
        folder: str | os.PathLike[str] | None = None,
        limit: int | str | None = None,
        fo: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if (target_protocol is None) == (fs is None):
            raise ConfigError("nodecache needs a file system behind it: write nodecache::s3://bucket/key, or pass fs=")
        if fs is not None:
            target_protocol = fs.protocol if isinstance(fs.protocol, str) else fs.protocol[0]
            target_options = fs.storage_options
        options = dict(target_options or {})
        self._files: PerProcess[Any] = PerProcess(functools.partial(open_filesystem, str(target_protocol), options))
        self._is_cacheable = not _PLACES.intersection(options)
        scheme = parse_url(f"{target_protocol}://x/x").scheme
        self._local = scheme == "file"
        self.counter = Counter()
        inner = (
            LocalReader(counter=self.counter) if self._local else FsspecReader(scheme, options, counter=self.counter)
        )
        self._reader = CachedReader(inner, DiskCache(folder, limit))

    @property
    def fs(self) -> Any:
        """The other file system, this process's own."""
        return self._files.get()

    @property
    def cache(self) -> DiskCache:
        """The disk cache that files are read through."""
        return self._reader.cache

    # -- reading

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        """Return bytes `start` to `end` of a file; both may count from its end."""
        version = self._version(path)
        if version is None:
            return self.fs.cat_file(self._inner(path), start=start, end=end, **kwargs)  # type: ignore[no-any-return]
        return self._read([version.part(start, end)])[0]

    def cat_ranges(
        self,
        paths: Sequence[str],
        starts: Sequence[int | None] | int | None,
        ends: Sequence[int | None] | int | None,
        max_gap: int | None = None,
        on_error: str = "return",
        **kwargs: Any,
    ) -> list[bytes | Exception]:
        """Return a part of each path, those that lack in the cache fetched together.

        With `on_error="return"` an error takes the place of what it concerns.
        """
        first = starts if isinstance(starts, Sequence) else [starts] * len(paths)
        last = ends if isinstance(ends, Sequence) else [ends] * len(paths)
        asked = list(zip(paths, first, last, strict=True))
        try:
            versions = {path: self._version(path) for path in dict.fromkeys(paths)}
            if None not in versions.values():
                return [*self._read([v.part(s, e) for p, s, e in asked if (v := versions[p]) is not None])]
        except Exception:
            if on_error != "return":
                raise
        return [self._cat_or_error(*one, on_error=on_error) for one in asked]

    def _cat_or_error(self, path: str, start: int | None, end: int | None, on_error: str) -> bytes | Exception:
        try:
            return self.cat_file(path, start, end)
        except Exception as e:
            if on_error != "return":
                raise
            return e

    def _open(
        self,
        path: str,
        mode: str = "rb",
        block_size: int | None = None,
        cache_type: str = "readahead",
        **kwargs: Any,
    ) -> Any:
        if mode != "rb":
            raise ConfigError(f"nodecache only reads: open {path!r} with mode {mode!r} without 'nodecache::'")
        version = self._version(path)
        if version is None:
            return self.fs.open(self._inner(path), mode, block_size=block_size, cache_type=cache_type, **kwargs)
        return NodeCacheFile(self, path, version, block_size or _READ_AHEAD_BYTES, cache_type, **kwargs)

    def _version(self, path: str) -> _Version | None:
        """Return the version that is there now, or None where nothing tells one from another."""
        if not self._is_cacheable:
            return None
        inner = self._inner(path)
        self.fs.invalidate_cache(self.fs._parent(inner))  # a listing remembered may be older than the file
        info = self.fs.info(inner)
        if info["type"] == "directory":
            raise IsADirectoryError(f"{path} is a directory; list it with ls or find")
        etag = file_version(os.stat(inner)) if self._local else version_token(info)
        if not etag or info.get("size") is None:
            return None
        return _Version(str(parse_url(self.fs.unstrip_protocol(inner))), info["size"], etag)

    def _read(self, parts: Sequence[_Part]) -> list[bytes]:
        """Return the bytes of each part, some extents at a time."""
        pieces: list[list[bytes]] = [[] for _ in parts]
        wanted = [
            (place, extent) for place, part in enumerate(parts) if part.start < part.stop for extent in part.extents()
        ]
        for first in builtins.range(0, len(wanted), _EXTENTS_AT_ONCE):
            some = wanted[first : first + _EXTENTS_AT_ONCE]
            ranges = list(dict.fromkeys(range for _, range in some))
            with contextlib.ExitStack() as stack:
                extents = self._reader.open_all(ranges)
                for extent in extents:
                    stack.callback(extent.close)
                by_range = dict(zip(ranges, extents, strict=True))
                for place, range in some:
                    start, stop = max(parts[place].start, range.start), min(parts[place].stop, range.stop)
                    pieces[place].append(by_range[range].read(start, stop))
        return [piece[0] if len(piece) == 1 else b"".join(piece) for piece in pieces]

    # -- what the other file system knows

    def _inner(self, path: str) -> str:
        return self.fs._strip_protocol(path.removeprefix("nodecache://"))  # type: ignore[no-any-return]

    def info(self, path: str, **kwargs: Any) -> Any:
        """Return what the other file system tells about a path."""
        return self.fs.info(self._inner(path), **kwargs)

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> Any:
        """List a directory of the other file system."""
        return self.fs.ls(self._inner(path), detail=detail, **kwargs)

    def find(self, path: str, maxdepth: int | None = None, withdirs: bool = False, **kwargs: Any) -> Any:
        """List all files below a path of the other file system."""
        return self.fs.find(self._inner(path), maxdepth=maxdepth, withdirs=withdirs, **kwargs)

    def glob(self, path: str, maxdepth: int | None = None, **kwargs: Any) -> Any:
        """List the files of the other file system that match a pattern."""
        return self.fs.glob(self._inner(path), maxdepth=maxdepth, **kwargs)

    def exists(self, path: str, **kwargs: Any) -> bool:
        """Return whether the other file system has something there."""
        return bool(self.fs.exists(self._inner(path), **kwargs))

    def modified(self, path: str) -> Any:
        """Return when a file was changed last."""
        return self.fs.modified(self._inner(path))

    def created(self, path: str) -> Any:
        """Return when a file was made."""
        return self.fs.created(self._inner(path))

    def ukey(self, path: str) -> Any:
        """Return the other file system's name for the version of a file."""
        return self.fs.ukey(self._inner(path))

    def unstrip_protocol(self, name: str) -> str:
        """Return the URL of a file in the other file system."""
        return str(self.fs.unstrip_protocol(self._inner(name)))

    def invalidate_cache(self, path: str | None = None) -> None:
        """Forget listings; cached bytes belong to a version and never grow old."""
        self.fs.invalidate_cache(None if path is None else self._inner(path))


class NodeCacheFile(AbstractBufferedFile):  # type: ignore[misc]
    """One version of a file, open for reading through the cache."""

    def __init__(
        self,
        fs: NodeCacheFileSystem,
        path: str,
        version: _Version,
        block_size: int,
        cache_type: str,
        **kwargs: Any,
    ) -> None:
        super().__init__(fs, path, "rb", block_size, cache_type=cache_type, size=version.size, **kwargs)
        self.version = version

    def _fetch_range(self, start: int, end: int) -> bytes:
        return self.fs._read([self.version.part(start, end)])[0]  # type: ignore[no-any-return]

    def __reduce__(self) -> Any:
        return _reopened, (self.fs, self.path, self.version, self.blocksize, self.loc)


def _reopened(fs: NodeCacheFileSystem, path: str, version: _Version, block_size: int, loc: int) -> NodeCacheFile:
    file = NodeCacheFile(fs, path, version, block_size, "readahead")
    file.seek(loc)
    return file
