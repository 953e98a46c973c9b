"""Arrays of a Zarr hierarchy, version 2 or 3, decoded by the zarr package over our readers."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from bucketfeed.errors import ConfigError, FormatError
from bucketfeed.formats.npy import check_dtype
from bucketfeed.formats.sources import Files, Source

if TYPE_CHECKING:
    from zarr.abc.store import ByteRequest
    from zarr.core.buffer import Buffer, BufferPrototype

_IDENTITY = "array"  # what an array that is the whole hierarchy is called


@dataclass(frozen=True)
class Zarr(Source):
    """An array under the manifest's prefix; `path` is "" for the one that is there itself."""

    path: str = ""
    step: int = 1

    def rows(self, files: Files, start: int, stop: int) -> np.ndarray:
        """Return rows `start` to `stop`."""
        array = files.handle(("zarr", self.path), functools.partial(_open, files, self.path))
        return np.asarray(array[start:stop])


def zarr_members(files: Files, paths: list[str] | None) -> dict[str, Source]:
    """Return arrays by path; where `paths` is None, those of the root group, or the one there is."""
    import_zarr()
    root = _open(files, "")
    if hasattr(root, "shape"):
        members = {_IDENTITY: ("", root)}
    elif paths is None:
        members = {name: (name, array) for name, array in root.arrays()}
    else:
        members = {path: (path, _open(files, path)) for path in paths}
    found: dict[str, Source] = {}
    for name, (path, array) in members.items():
        where = f"{files.manifest.url} array {name!r}"
        if not hasattr(array, "shape"):
            raise FormatError(f"{where} is a group; name an array in it")
        check_dtype(np.dtype(array.dtype), where)
        step = array.chunks[0] if array.chunks else 1
        found[name] = Zarr(0, array.shape, np.dtype(array.dtype), path, step)
    if not found:
        raise FormatError(f"{files.manifest.url} has no arrays in its root group; name them with their paths")
    return found


def import_zarr() -> None:
    """Raise `ConfigError` where the package is not installed."""
    try:
        import zarr  # noqa: F401
    except ImportError as e:
        raise ConfigError(f"Zarr needs another package ({e}): pip install 'bucketfeed[arrays]'") from e


def _open(files: Files, path: str) -> Any:
    import zarr

    try:
        return zarr.open(store=_store()(files), path=path, mode="r")
    except FileNotFoundError as e:
        raise ConfigError(f"{files.manifest.url} has no Zarr array or group {path!r}; check the name") from e


@functools.cache
def _store() -> Any:
    """Return the class of stores, made when zarr is first needed."""
    from zarr.abc.store import OffsetByteRequest, RangeByteRequest, Store, SuffixByteRequest

    class ManifestStore(Store):
        """The objects of a manifest, for reading."""

        supports_writes = False
        supports_deletes = False
        supports_listing = True

        def __init__(self, files: Files) -> None:
            super().__init__(read_only=True)
            self._files = files

        def __eq__(self, other: object) -> bool:
            return isinstance(other, ManifestStore) and other._files is self._files

        __hash__ = Store.__hash__

        def _number(self, key: str) -> int | None:
            manifest = self._files.manifest
            try:
                return manifest.find(manifest.url + key)
            except KeyError:
                return None

        async def get(
            self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None
        ) -> Buffer | None:
            number = self._number(key)
            if number is None:
                return None
            size = self._files.manifest.size(number)
            start, stop = 0, size
            if isinstance(byte_range, RangeByteRequest):
                start, stop = byte_range.start, min(size, byte_range.end)
            elif isinstance(byte_range, OffsetByteRequest):
                start = byte_range.offset
            elif isinstance(byte_range, SuffixByteRequest):
                start = max(0, size - byte_range.suffix)
            if stop <= start:
                return prototype.buffer.from_bytes(b"")
            data = await asyncio.to_thread(self._files.read, number, [(start, stop)], kept=True)
            return prototype.buffer.from_bytes(bytes(data[0]))

        async def get_partial_values(
            self, prototype: BufferPrototype, key_ranges: Iterable[tuple[str, ByteRequest | None]]
        ) -> list[Buffer | None]:
            return list(await asyncio.gather(*(self.get(key, prototype, part) for key, part in key_ranges)))

        async def exists(self, key: str) -> bool:
            return self._number(key) is not None

        async def set(self, key: str, value: Buffer) -> None:
            raise ConfigError(f"{self._files.manifest.url} is only read, {key!r} is not written")

        async def delete(self, key: str) -> None:
            raise ConfigError(f"{self._files.manifest.url} is only read, {key!r} is not removed")

        async def list(self) -> AsyncIterator[str]:
            manifest = self._files.manifest
            for number in range(len(manifest)):
                yield manifest.key(number)

        async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
            async for key in self.list():
                if key.startswith(prefix):
                    yield key

        async def list_dir(self, prefix: str) -> AsyncIterator[str]:
            under = f"{prefix.rstrip('/')}/" if prefix else ""
            seen: dict[str, None] = {}
            async for key in self.list_prefix(under):
                seen.setdefault(key[len(under) :].partition("/")[0])
            for name in seen:
                yield name

    return ManifestStore
