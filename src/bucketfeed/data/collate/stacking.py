"""Samples of one shape to one tensor a field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from bucketfeed.data.collate.buffers import Allocate, Buffers, fresh
from bucketfeed.data.collate.fields import Field, applied, gathered
from bucketfeed.data.collate.values import from_array

_PLAIN = {bool, int, float}


def default_collate(samples: Sequence[Any]) -> Any:
    """Return one batch made of `samples`.

    Dicts become a dict of batched fields, tuples a tuple; arrays, tensors and numbers become one tensor of shape
    (batch, ...), of the type that torch promotes theirs to; bytes, str, lists and anything else stay a list. Raises
    `ConfigError` naming the field and both samples, with their shapes, where they do not fit together.
    """
    return applied(gathered(samples), stacked)


@dataclass(frozen=True, slots=True)
class stack:
    """Stacks as `default_collate` does, into memory that is used again.

    Args:
        missing: the number in place of None among numbers, or one for each field by its path; without, it is an error.
        out: gives the memory for a tensor of (shape, dtype). A batch in `Buffers` stays valid as long as it is held.

    >>> bf.Loader(ds, batch_size=64, collate=bf.collate.stack(missing=-1))
    """

    missing: float | Mapping[str, float] | None = None
    out: Allocate = field(default_factory=Buffers, compare=False)

    def __call__(self, samples: Sequence[Any]) -> Any:
        """Return one batch made of `samples`."""
        return applied(gathered(samples), lambda column: stacked(column, self.missing, self.out))


def stacked(field: Field, missing: float | Mapping[str, float] | None = None, out: Allocate = fresh) -> Any:
    """Return the values of one field as a tensor of shape (batch, ...), or as a list where they are no numbers."""
    kinds = set(map(type, field.values))
    if kinds <= _PLAIN and max(map(abs, field.values)) < 2**63:
        return torch.tensor(field.values, dtype=torch.float64 if float in kinds else None)
    if kinds <= {str, bytes}:
        return list(field.values)
    if kinds == {np.ndarray} and (like := field.values[0]).dtype.kind in "biufc":
        empty = from_array(like[..., :0] if like.ndim else like)
        if empty is not None and all(value.dtype == like.dtype for value in field.values):
            field.check_shapes(field.values)
            batch = out((len(field.values), *like.shape), empty.dtype)
            np.stack(field.values, out=batch.numpy())
            return batch
    if len(kinds) == 1 and issubclass(kinds.copy().pop(), np.generic):
        return as_tensors(np.array(field.values))
    tensors = field.tensors(missing)
    if tensors is None:
        return [value.tolist() if isinstance(value, np.ndarray | np.generic) else value for value in field.values]
    field.check_shapes(tensors)
    if tensors[0].layout is not torch.strided or tensors[0].device.type != "cpu":
        return torch.stack(tensors)
    return torch.stack(tensors, out=out((len(tensors), *tensors[0].shape), tensors[0].dtype))


def as_tensors(columns: Any) -> Any:
    """Return columns that are stacked already, as `default_collate` gives them: arrays become tensors."""
    if isinstance(columns, dict):
        return {name: as_tensors(column) for name, column in columns.items()}
    if isinstance(columns, list) and any(isinstance(value, np.ndarray) for value in columns):
        return [as_tensors(value) for value in columns]
    if not isinstance(columns, np.ndarray):
        return columns
    tensor = from_array(columns)
    return columns.tolist() if tensor is None else tensor  # text and dates have no tensor
