"""What the rows of arrays are made of, and where they lie."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from bucketfeed.formats.format import Ints

if TYPE_CHECKING:
    from bucketfeed.formats.sources import Source


@dataclass(frozen=True)
class Field:
    """A named array of each row: its dtype as it is stored, and its shape without the first axis."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """What a row is made of: its fields, one behind the other."""

    fields: tuple[Field, ...]

    @functools.cached_property
    def record(self) -> np.dtype:
        """The dtype of a whole row."""
        return np.dtype([(f"f{number}", field.dtype, field.shape) for number, field in enumerate(self.fields)])

    def columns(self, rows: np.ndarray) -> dict[str, Any]:
        """Return each field of `rows`, any shape of records, as native arrays of their own; see `native`."""
        return {field.name: native(rows[f"f{number}"]) for number, field in enumerate(self.fields)}


def native(array: np.ndarray) -> Any:
    """Return an array's values in this machine's byte order, in memory of their own.

    Structures become dicts of fields, text and raw bytes lists of str and bytes, dates and times int64 in their unit.
    """
    if array.dtype.names:
        return {name: native(array[name]) for name in array.dtype.names}
    if array.dtype.kind in "SUV":
        return array.tolist()
    if array.dtype.kind in "mM":
        return np.array(array, array.dtype.newbyteorder("="), order="C").view(np.int64)
    return np.require(array, array.dtype.newbyteorder("="), ["C", "W"])


@dataclass(frozen=True, eq=False)
class Shards:
    """Where the rows of each shard lie: the object, the byte of its first row, how many there are.

    Attributes:
        sources: per shard what each field is read from, where rows are made of several ranges or decoded; else None.
        step: rows that are best read together: a chunk of HDF5 or Zarr.
        whole: all objects together are the one shard there is.
    """

    objects: Ints
    offsets: Ints
    rows: Ints
    sources: tuple[tuple[Source, ...], ...] | None = None
    step: int = 1
    whole: bool = False
