"""Single values as tensors, and the types that hold them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from bucketfeed.data.collate.buffers import Allocate, fresh
from bucketfeed.errors import ConfigError

_NUMBERS = (bool, int, float)
# torch has no common type for unsigned and signed integers; these hold the values of both.
_SIGNED = {torch.uint16: torch.int32, torch.uint32: torch.int64}


def as_tensor(value: Any, lists: bool) -> torch.Tensor | None:
    """Return a number, an array, a tensor or, with `lists`, a list of numbers as a tensor; None for anything else."""
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, np.ndarray | np.generic):
        return from_array(np.asarray(value))
    if isinstance(value, _NUMBERS):
        return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)
    if lists and isinstance(value, list):
        item: Any = value
        while isinstance(item, list) and item:
            item = item[0]
        if isinstance(item, (*_NUMBERS, np.generic)) or not value:
            return from_array(np.asarray(value))
    return None


def from_array(array: np.ndarray) -> torch.Tensor | None:
    """Return a tensor of the array's numbers, in its memory where that can be; None for text and dates."""
    if array.dtype.kind not in "biufc":
        named = getattr(torch, array.dtype.name, None)  # bfloat16 and others, which numpy has from elsewhere
        if not isinstance(named, torch.dtype) or named.itemsize != array.dtype.itemsize:
            return None
        words = torch.from_numpy(np.array(array, order="C").reshape(-1).view(np.uint8))
        return words.view(named).reshape(array.shape)
    native = np.ascontiguousarray(array, array.dtype.newbyteorder("=")).reshape(array.shape)
    return torch.from_numpy(native if native.flags.writeable else native.copy())


def promoted(one: torch.dtype, other: torch.dtype) -> torch.dtype:
    """Return the type that torch promotes both to, or one that holds both. Raises `RuntimeError` without either."""
    try:
        return torch.promote_types(one, other)
    except RuntimeError:
        return torch.promote_types(_SIGNED.get(one, one), _SIGNED.get(other, other))


def held(value: float, dtype: torch.dtype, path: str) -> float:
    """Return `value`. Raises `ConfigError` unless tensors of `dtype` hold it."""
    fits = dtype.is_floating_point or dtype.is_complex
    if dtype is torch.bool:
        fits = value in (0, 1)
    elif not fits:
        limits = torch.iinfo(dtype)
        fits = limits.min <= value <= limits.max and value == int(value)
    if not fits:
        raise ConfigError(f"field {path!r} is {dtype}, which does not hold {value!r}; pass another value for it")
    return value


def joined(tensors: Sequence[torch.Tensor], out: Allocate = fresh) -> torch.Tensor:
    """Return tensors that differ in their first dimension only, end to end."""
    shape = (sum(len(tensor) for tensor in tensors), *tensors[0].shape[1:])
    return torch.cat(list(tensors), out=out(shape, tensors[0].dtype))
