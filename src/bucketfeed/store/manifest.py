"""The shards of a data set, listed once and frozen: exact keys, sizes and versions in one mapped file."""

from __future__ import annotations

import bisect
import contextlib
import functools
import json
import mmap
import os
import shutil
import tempfile
import weakref
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray
from tqdm.auto import tqdm

from bucketfeed.errors import CacheError, ConfigError, NotFoundError
from bucketfeed.store.listing import Listed, find_object, list_objects
from bucketfeed.store.ranges import Range
from bucketfeed.store.urls import Url, parent_url, parse_url

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
        try:
            if self._map[: len(_MAGIC)] != _MAGIC:
                raise ValueError("another file, or another version")
            head_end = self._map.find(b"\n", len(_MAGIC)) + 1
            head = json.loads(self._map[len(_MAGIC) : head_end])
            self.url: str = head["url"]
            self.fingerprint: str = head["fingerprint"]
            self.version: str = head["version"]
            self.total_bytes: int = head["total_bytes"]
            n, at = head["objects"], _aligned(head_end)
            self.sizes: NDArray[np.uint64] = np.frombuffer(self._map, "<u8", n, at)
            self._key_ends = np.frombuffer(self._map, "<u8", n + 1, at + 8 * n)
            self._etag_ends = np.frombuffer(self._map, "<u8", n + 1, at + 8 * (2 * n + 1))
            self._heap = at + 8 * (3 * n + 2)
            if len(self._map) != self._heap + int(self._key_ends[-1] + self._etag_ends[-1]):
                raise ValueError(f"its {len(self._map):,} bytes are not what its head announces")
        except (ValueError, KeyError) as e:
            raise CacheError(f"{self.path} is no manifest ({e}); remove it and open the data set again") from e
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
                return cls._write(parse_url(parent_url(parsed)), [single], folder)
            parsed = parsed._replace(key=f"{parsed.key}/" if parsed.key else "")
        found = list_objects(parsed, storage_options)
        # Quick listings show no bar.
        bar = tqdm(found, desc=f"listing {parsed}", unit=" objects", delay=1, disable=not progress)
        return cls._write(parsed, bar, folder)

    @classmethod
    def from_objects(
        cls, url: str, objects: Iterable[tuple[str, int, str]], *, folder: str | os.PathLike[str] | None = None
    ) -> Manifest:
        """Return the manifest of objects given as (url, size in bytes, etag), all under `url`.

        Raises `ConfigError` for one that is not.
        """
        parsed = parse_url(url)
        root = parsed if not parsed.key or parsed.key.endswith("/") else parsed._replace(key=parsed.key + "/")

        def listed(url: str, size: int, etag: str) -> Listed:
            if not url.startswith(str(root)):
                raise ConfigError(f"{url} is not under {root}: give the URL that all objects have in common")
            return Listed(url[len(root.root) :], size, etag)

        return cls._write(root, (listed(*one) for one in objects), folder)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Manifest:
        """Return the manifest that was written to `path`. Raises `CacheError`."""
        return cls(path)

    @classmethod
    def from_data(cls, data: bytes | memoryview, folder: str | os.PathLike[str]) -> Manifest:
        """Return the manifest whose `data` these are, its file kept in `folder`."""
        path = Path(folder) / f"{_digest(data)}.manifest"
        if not path.exists():
            _publish(path, [data])
        return cls(path)

    @classmethod
    def _write(cls, root: Url, objects: Iterable[Listed], folder: str | os.PathLike[str] | None) -> Manifest:
        keys, etags, sizes = _Texts(), _Texts(), array("Q")
        for found in objects:
            keys.add(_encoded(found.key[len(root.key) :]))
            etags.add(found.etag.encode())
            sizes.append(found.size)
        if not sizes:
            raise NotFoundError(f"there is nothing at or under {root}; check the spelling, or list the bucket")
        order = sorted(range(len(sizes)), key=keys.__getitem__)
        if order != list(range(len(sizes))):
            keys, etags, sizes = keys.take(order), etags.take(order), array("Q", map(sizes.__getitem__, order))
        # A copy of a folder is the same data, although its files have other inodes and times.
        version = _digest(sizes, keys.ends, keys.text, etags.ends, etags.text)
        local = root.scheme in _LOCAL_SCHEMES
        head = {
            "url": str(root),
            "objects": len(sizes),
            "fingerprint": _digest(sizes, keys.ends, keys.text) if local else version,
            "version": version,
            "total_bytes": sum(sizes),
        }
        start = _MAGIC + json.dumps(head).encode() + b"\n"
        parts = (start.ljust(_aligned(len(start)), b"\0"), sizes, keys.ends, etags.ends, keys.text, etags.text)
        temporary = tempfile.mkdtemp(prefix="bucketfeed-") if folder is None else None
        path = Path(folder or temporary or "") / f"{_digest(*parts)}.manifest"
        _publish(path, parts)
        manifest = cls(path)
        if temporary is not None:
            weakref.finalize(manifest, clean_up, temporary, os.getpid())
        return manifest

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def data(self) -> bytes:
        """The bytes of its file."""
        return self._map[:]

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

    def find(self, url: str) -> int:
        """Return the number of the object at `url`. Raises `KeyError` where it is none of these."""
        key = _encoded(url[len(self.url) :])
        i = bisect.bisect_left(range(len(self)), key, key=lambda i: _encoded(self.key(i)))
        if i == len(self) or self.object_url(i) != url:
            raise KeyError(url)
        return i

    def range(self, i: int, start: int = 0, stop: int | None = None) -> Range:
        """Return the range of object `i`, of the version that was listed; all of it by default."""
        url, etag = self._named(i)
        return Range(url, start, self.size(i) if stop is None else stop, etag or None)

    def __iter__(self) -> Iterator[str]:
        return (self.object_url(i) for i in range(len(self)))

    def _name(self, i: int) -> tuple[str, str]:
        i = range(len(self))[i]
        heap = self._heap
        key = self._map[heap + int(self._key_ends[i]) : heap + int(self._key_ends[i + 1])]
        heap += int(self._key_ends[-1])
        etag = self._map[heap + int(self._etag_ends[i]) : heap + int(self._etag_ends[i + 1])]
        return self.url + key.decode("utf-8", "surrogateescape"), etag.decode()

    def __reduce__(self) -> tuple[Callable[[str], Manifest], tuple[str]]:
        return type(self), (str(self.path),)

    def __repr__(self) -> str:
        return f"Manifest({self.url!r}, objects={len(self):,}, bytes={self.total_bytes:,})"


class _Texts:
    """Many short texts, one after the other, and where each ends: a fifth of the memory of lists."""

    def __init__(self) -> None:
        self.text = bytearray()
        self.ends = array("Q", [0])

    def add(self, text: bytes) -> None:
        self.text += text
        self.ends.append(len(self.text))

    def take(self, order: Iterable[int]) -> _Texts:
        taken = _Texts()
        for i in order:
            taken.add(self[i])
        return taken

    def __getitem__(self, i: int) -> bytes:
        return bytes(self.text[self.ends[i] : self.ends[i + 1]])


def _digest(*parts: bytes | bytearray | memoryview | array[int]) -> str:
    digest = xxhash.xxh3_128()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def _encoded(key: str) -> bytes:
    return key.encode("utf-8", "surrogateescape")  # a file name need not be UTF-8


def _aligned(offset: int) -> int:
    return -(-offset // 8) * 8


def _publish(path: Path, parts: Iterable[bytes | bytearray | memoryview | array[int]]) -> None:
    written = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.name, delete=False) as file:
            written = file.name
            for part in parts:
                file.write(part)
        os.replace(written, path)
    except BaseException as e:
        if written is not None:
            with contextlib.suppress(OSError):
                os.unlink(written)
        if isinstance(e, OSError):
            raise CacheError(f"the manifest can't be written to {path.parent}: {e}; choose another cache folder") from e
        raise


def clean_up(temporary: str, pid: int) -> None:
    """Remove a temporary folder, in the process `pid` that made it."""
    if os.getpid() == pid:  # a forked worker that ends must not take its parent's file along
        shutil.rmtree(temporary, ignore_errors=True)
