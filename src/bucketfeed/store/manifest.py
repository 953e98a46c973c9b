"""The shards of a data set, listed once and frozen: exact keys, sizes and versions in one mapped file."""

from __future__ import annotations

import functools
import json
import mmap
import os
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray
from tqdm.auto import tqdm

from bucketfeed.errors import CacheError, NotFoundError
from bucketfeed.store.listing import Listed, find_object, list_objects
from bucketfeed.store.ranges import Range
from bucketfeed.store.urls import parent_url, parse_url

_MAGIC = b"bucketfeed manifest 1\n"
_LOCAL_SCHEMES = ("file", "memory")
_KEPT_NAMES = 4096  # urls and etags kept as text, for shards that are read again and again


class Manifest:
    """Objects by number, sorted by the bytes of their keys. Opened from its file, it costs a process next to nothing.

    Made by `from_url`, `from_objects` or `open`; pickles as the file's path.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            with open(self.path, "rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        except (OSError, ValueError) as e:
            raise CacheError(f"the manifest {self.path} can't be opened: {e}; open the data set again") from e
        if not self._map[: len(_MAGIC)] == _MAGIC:
            raise CacheError(f"{self.path} is no manifest of this version; remove it and open the data set again")
        head_end = self._map.find(b"\n", len(_MAGIC)) + 1
        head = json.loads(self._map[len(_MAGIC) : head_end])
        self.url: str = head["url"]
        self.fingerprint: str = head["fingerprint"]
        self.total_bytes: int = head["total_bytes"]
        n = head["objects"]
        at = _aligned(head_end)
        self.sizes: NDArray[np.uint64] = np.frombuffer(self._map, "<u8", n, at)
        self._key_ends = np.frombuffer(self._map, "<u8", n + 1, at + 8 * n)
        self._etag_ends = np.frombuffer(self._map, "<u8", n + 1, at + 8 * (2 * n + 1))
        self._heap = at + 8 * (3 * n + 2)
        self._named = functools.lru_cache(_KEPT_NAMES)(self._name)

    @classmethod
    def from_url(
        cls,
        url: str | os.PathLike[str],
        *,
        storage_options: Mapping[str, Any] | None = None,
        folder: str | os.PathLike[str] | None = None,
        progress: bool = False,
    ) -> Manifest:
        """List `url` and freeze what is there: the one object of this exact key, or all under it as a prefix.

        `folder` is where the mapped file is kept; a temporary one, removed with this process, where None.
        Raises `NotFoundError`, `AccessError`, `ConfigError` or `ReadError`.
        """
        parsed = parse_url(url)
        if not parsed.key.endswith("/"):
            single = find_object(parsed, storage_options) if parsed.key else None
            if single is not None:
                return cls._write(parent_url(parsed), [single], folder)
            parsed = parsed._replace(key=f"{parsed.key}/" if parsed.key else "")
        found = list_objects(parsed, storage_options)
        # Quick listings show no bar.
        bar = tqdm(found, desc=f"listing {parsed}", unit=" objects", delay=1, disable=not progress)
        objects = list(bar)
        if not objects:
            raise NotFoundError(f"there is nothing at or under {parsed}; check the spelling, or list the bucket")
        return cls._write(str(parsed), objects, folder)

    @classmethod
    def from_objects(
        cls, url: str, objects: Iterable[tuple[str, int, str]], *, folder: str | os.PathLike[str] | None = None
    ) -> Manifest:
        """Return the manifest of objects given as (url, size in bytes, etag), all under `url`."""
        parsed = parse_url(url)
        root = parsed if not parsed.key or parsed.key.endswith("/") else parsed._replace(key=parsed.key + "/")
        return cls._write(str(root), [Listed(parse_url(u).key, size, etag) for u, size, etag in objects], folder)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Manifest:
        """Return the manifest that was written to `path`. Raises `CacheError`."""
        return cls(path)

    @classmethod
    def _write(cls, url: str, objects: list[Listed], folder: str | os.PathLike[str] | None) -> Manifest:
        parsed = parse_url(url)
        prefix = len(parsed.key)
        rows = sorted((_encoded(o.key[prefix:]), o.size, o.etag.encode()) for o in objects)
        keys, etags = b"".join(row[0] for row in rows), b"".join(row[2] for row in rows)
        sizes = np.array([row[1] for row in rows], "<u8")
        key_ends = np.cumsum([0, *(len(row[0]) for row in rows)], dtype="<u8")
        etag_ends = np.cumsum([0, *(len(row[2]) for row in rows)], dtype="<u8")
        columns = sizes.tobytes() + key_ends.tobytes()
        # A copy of a folder is the same data, although its files have other inodes and times.
        versions = b"" if parsed.scheme in _LOCAL_SCHEMES else etag_ends.tobytes() + etags
        fingerprint = xxhash.xxh3_128_hexdigest(columns + keys + versions)
        head = json.dumps(
            {
                "url": url,
                "objects": len(rows),
                "fingerprint": fingerprint,
                "total_bytes": int(sizes.sum(dtype=np.uint64)),
            }
        ).encode()
        start = _MAGIC + head + b"\n"
        content = start.ljust(_aligned(len(start)), b"\0") + columns + etag_ends.tobytes() + keys + etags
        temporary = None
        if folder is None:
            temporary = tempfile.TemporaryDirectory(prefix="bucketfeed-")
            folder = temporary.name
        path = Path(folder) / f"{xxhash.xxh3_128_hexdigest(content)}.manifest"
        if not path.exists():
            _publish(path, content)
        manifest = cls(path)
        if temporary is not None:
            weakref.finalize(manifest, _clean_up, temporary, os.getpid())
        return manifest

    def __len__(self) -> int:
        return len(self.sizes)

    def key(self, i: int) -> str:
        """Return the key of object `i` relative to `url`, exactly."""
        return self._named(i)[0][len(self.url) :]

    def object_url(self, i: int) -> str:
        """Return the URL of object `i`."""
        return self._named(i)[0]

    def etag(self, i: int) -> str:
        """Return the version of object `i` as its store names it; "" where the store names none."""
        return self._named(i)[1]

    def size(self, i: int) -> int:
        """Return the size of object `i` in bytes."""
        return int(self.sizes[i])

    def range(self, i: int, start: int = 0, stop: int | None = None) -> Range:
        """Return the range of object `i`, of the version that was listed; all of it by default."""
        url, etag = self._named(i)
        return Range(url, start, self.size(i) if stop is None else stop, etag or None)

    def __iter__(self) -> Iterator[str]:
        return (self.object_url(i) for i in range(len(self)))

    def _name(self, i: int) -> tuple[str, str]:
        heap = self._heap
        key = self._map[heap + int(self._key_ends[i]) : heap + int(self._key_ends[i + 1])]
        heap += int(self._key_ends[-1])
        etag = self._map[heap + int(self._etag_ends[i]) : heap + int(self._etag_ends[i + 1])]
        return self.url + key.decode("utf-8", "surrogateescape"), etag.decode()

    def __reduce__(self) -> tuple[Callable[[str], Manifest], tuple[str]]:
        return type(self), (str(self.path),)

    def __repr__(self) -> str:
        return f"Manifest({self.url!r}, objects={len(self):,}, bytes={self.total_bytes:,})"


def _encoded(key: str) -> bytes:
    return key.encode("utf-8", "surrogateescape")  # a file name need not be UTF-8


def _aligned(offset: int) -> int:
    return -(-offset // 8) * 8


def _publish(path: Path, content: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.name, delete=False) as file:
            file.write(content)
        os.replace(file.name, path)
    except OSError as e:
        raise CacheError(f"the manifest can't be written to {path.parent}: {e}; choose another cache folder") from e


def _clean_up(temporary: tempfile.TemporaryDirectory[str], pid: int) -> None:
    if os.getpid() == pid:  # a forked worker that ends must not take its parent's file along
        temporary.cleanup()
