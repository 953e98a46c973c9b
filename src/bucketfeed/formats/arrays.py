"""Arrays as data sets: `.npy`, `.npz`, HDF5 and Zarr, a row or a window of rows a sample, several zipped by row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from bucketfeed.cache.disk import DiskCache
from bucketfeed.errors import ConfigError, FormatError
from bucketfeed.formats.format import Format
from bucketfeed.formats.grid import ObjectReader
from bucketfeed.formats.layout import Field, Layout, Shards
from bucketfeed.formats.npy import npz_members, read_heads
from bucketfeed.formats.sources import Files, Source
from bucketfeed.store.manifest import Manifest
from bucketfeed.store.ranges import RangeReader
from bucketfeed.store.whole import whole

if TYPE_CHECKING:
    from bucketfeed.formats.rows import ArrayIndex

_ARRAY = "array"  # the field of what has no name


@dataclass(frozen=True)
class RowFormat(Format):
    """A format whose samples are rows at places that arithmetic gives.

    Args:
        window: rows in a sample; None gives single rows, without an axis for the window.
        stride: rows from one sample to the next; the window's where None.
    """

    window: int | None = None
    stride: int | None = None
    indexed: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for name in ("window", "stride"):
            if getattr(self, name) is not None:
                whole(name, getattr(self, name), 1)

    @property
    def rows_per_sample(self) -> int:
        """How many rows a sample takes."""
        return self.window or 1

    @property
    def step(self) -> int:
        """How many rows lie between the beginnings of two samples."""
        return self.stride or self.window or 1

    @property
    def numbering(self) -> str:
        """All options: each makes other samples."""
        return repr(self)

    def finished(self, columns: dict[str, Any]) -> dict[str, Any]:
        """Return the fields of a batch of samples, given those that are stored."""
        return columns


@dataclass(frozen=True)
class Arrays(RowFormat):
    """Rows of arrays.

    Args:
        fields: pairs of a field's name and its array: a member of the file, or a file under the prefix. None takes all
            arrays of an `.npz`, of the root group of an HDF5 or Zarr, and field `array` of `.npy` files.
    """

    name: ClassVar[str] = "arrays"
    suffixes: ClassVar[tuple[str, ...]] = (".npy", ".npz", ".h5", ".hdf5", ".hdf")
    fields: tuple[tuple[str, str], ...] | None = None

    def closed(self, manifest: Manifest, reader: RangeReader, cache: DiskCache | None) -> ArrayIndex:
        """Return the index: the headers are read, nothing is scanned."""
        kept = None if cache is None or reader.is_local else ObjectReader(reader, cache, manifest)
        files = Files(manifest, reader, kept)
        whole = True
        if is_zarr(manifest):
            from bucketfeed.formats.zarr import zarr_members

            found = [self._chosen(zarr_members(files, self._paths), manifest.url)]
        elif objects := self._objects(files):
            found = [objects]
        else:
            whole = False
            found = self._shards(files)
        return self._index(manifest, found, whole)

    @property
    def _paths(self) -> list[str] | None:
        return None if self.fields is None else [path for _, path in self.fields]

    def _objects(self, files: Files) -> dict[str, Source] | None:
        """Return the arrays where each field is an `.npy` object of its own."""
        paths = self._paths
        if paths is None or not all(path.endswith(".npy") for path in paths):
            return None
        manifest = files.manifest
        numbers = {manifest.key(number): number for number in range(len(manifest))}
        if absent := [path for path in paths if path not in numbers]:
            raise ConfigError(f"{manifest.url} has no {absent[0]!r}; the first it has is {manifest.key(0)!r}")
        arrays = read_heads(files, [numbers[path] for path in paths])
        return {name: array for (name, _), array in zip(self.fields or (), arrays, strict=True)}

    def _shards(self, files: Files) -> list[dict[str, Source]]:
        manifest = files.manifest
        objects = [n for n in range(len(manifest)) if manifest.key(n).lower().endswith(self.suffixes)]
        if not objects:
            raise FormatError(f"{manifest.url} has no arrays: none of its objects ends with {', '.join(self.suffixes)}")
        arrays = [n for n in objects if manifest.key(n).lower().endswith(".npy")]
        if len(arrays) == len(objects):
            if self.fields is not None and len(self.fields) > 1:
                raise ConfigError(f"{manifest.url} has single arrays: give each field an object under their prefix")
            name = self.fields[0][0] if self.fields else _ARRAY
            return [{name: array} for array in read_heads(files, arrays)]
        if arrays:
            raise FormatError(
                f"{manifest.url} has .npy ({manifest.key(arrays[0])!r}) beside other arrays; open one kind at a time"
            )
        return [self._chosen(self._members(files, number), manifest.object_url(number)) for number in objects]

    def _members(self, files: Files, number: int) -> dict[str, Source]:
        if files.manifest.key(number).lower().endswith(".npz"):
            return npz_members(files, number)
        from bucketfeed.formats.hdf5 import hdf5_members

        return hdf5_members(files, number, self._paths)

    def _chosen(self, members: dict[str, Source], url: str) -> dict[str, Source]:
        if self.fields is None:
            return members
        if absent := [path for _, path in self.fields if path not in members]:
            raise ConfigError(f"{url} has no array {absent[0]!r}; it has {sorted(members)}")
        return {name: members[path] for name, path in self.fields}

    def _index(self, manifest: Manifest, found: Sequence[dict[str, Source]], whole: bool) -> ArrayIndex:
        from bucketfeed.formats.rows import ArrayIndex

        for shard in found:
            _check(shard, manifest)
        layout = _layout(found[0])
        for shard in found[1:]:
            if _layout(shard) != layout:
                one, other = (manifest.object_url(next(iter(s.values())).number) for s in (found[0], shard))
                raise FormatError(
                    f"shards of one array have equal rows, but {one} has {_said(found[0])} and {other} has "
                    f"{_said(shard)}; open them one by one, or pass format='raw' to get each file as one sample"
                )
        firsts = [next(iter(shard.values())) for shard in found]
        direct = [source.direct for source in firsts]
        plain = len(layout.fields) == 1 and None not in direct
        shards = Shards(
            objects=np.array([source.number for source in firsts], np.int64),
            offsets=np.array(direct if plain else [0] * len(found), np.int64),
            rows=np.array([source.shape[0] for source in firsts], np.int64),
            sources=None if plain else tuple(tuple(shard.values()) for shard in found),
            step=max(source.step for shard in found for source in shard.values()),
            whole=whole and not plain,
        )
        return ArrayIndex(manifest, self, layout, shards)

    def finished(self, columns: dict[str, Any]) -> dict[str, Any]:
        """Return the fields; those of a structure that has no name are the sample's own."""
        only = columns.get(_ARRAY)
        return only if self.fields is None and isinstance(only, dict) else columns


def is_zarr(manifest: Manifest) -> bool:
    """Return whether the objects are those of one Zarr hierarchy."""

    def has(name: str) -> bool:
        try:
            manifest.find(manifest.url + name)
        except KeyError:
            return False
        return True

    return any(has(name) for name in ("zarr.json", ".zarray", ".zgroup"))


def _layout(shard: dict[str, Source]) -> Layout:
    return Layout(tuple(Field(name, source.dtype, source.shape[1:]) for name, source in shard.items()))


def _said(shard: dict[str, Source]) -> str:
    return ", ".join(f"{name} {source.shape} of {source.dtype}" for name, source in shard.items())


def _check(shard: dict[str, Source], manifest: Manifest) -> None:
    for name, source in shard.items():
        where = f"{manifest.object_url(source.number)}, field {name!r},"
        if not source.shape:
            raise FormatError(f"{where} has shape (): a single value has no rows; read it with format='raw'")
        if not source.dtype.itemsize * int(np.prod(source.shape[1:])):
            raise FormatError(f"{where} has rows of no bytes: shape {source.shape} of {source.dtype}")
    lengths = {source.shape[0] for source in shard.values()}
    if len(lengths) > 1:
        url = manifest.object_url(next(iter(shard.values())).number)
        raise FormatError(f"arrays of one sample have equally many rows, but {url} has {_said(shard)}; name others")
