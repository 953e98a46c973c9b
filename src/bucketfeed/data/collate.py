"""Samples to batches: the default collate function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from bucketfeed.errors import ConfigError


def default_collate(samples: Sequence[Any]) -> Any:
    """Return one batch made of `samples`.

    Dicts become a dict of batched fields, tuples a tuple; arrays, tensors and numbers become one tensor of shape
    (batch, ...); bytes, str, None and anything else stay a list. Raises `ConfigError` naming the field, both
    shapes and both samples where they do not fit together.
    """
    return _collate(samples, "", [_name(sample, number) for number, sample in enumerate(samples)])


def as_tensors(columns: Any) -> Any:
    """Return columns that are stacked already, as `default_collate` gives them: arrays become tensors."""
    if isinstance(columns, dict):
        return {name: as_tensors(column) for name, column in columns.items()}
    if isinstance(columns, list) and any(isinstance(value, np.ndarray) for value in columns):
        return [as_tensors(value) for value in columns]
    return _to_tensor(columns) if isinstance(columns, np.ndarray) else columns


def _name(sample: Any, number: int) -> str:
    key = sample.get("__key__") if isinstance(sample, dict) else None
    return repr(key) if isinstance(key, str) else f"number {number} of the batch"


def _collate(values: Sequence[Any], path: str, names: list[str]) -> Any:
    first = values[0]
    if isinstance(first, dict):
        for value, name in zip(values, names, strict=True):
            if not isinstance(value, dict) or value.keys() != first.keys():
                found = sorted(map(str, value)) if isinstance(value, dict) else type(value).__name__
                raise ConfigError(
                    f"samples of one batch have different fields{_at(path)}: {names[0]} has "
                    f"{sorted(map(str, first))}, {name} has {found}; make them alike in decode=, or pass collate="
                )
        return {k: _collate([v[k] for v in values], f"{path}.{k}" if path else str(k), names) for k in first}
    if isinstance(first, tuple):
        for value, name in zip(values, names, strict=True):
            if not isinstance(value, tuple) or len(value) != len(first):
                raise ConfigError(
                    f"samples of one batch have different lengths{_at(path)}: {names[0]} has {len(first)} "
                    f"entries, {name} is {value!r:.80}; make them alike in decode=, or pass collate="
                )
        columns = [_collate([v[i] for v in values], f"{path}[{i}]", names) for i in range(len(first))]
        return type(first)(*columns) if hasattr(first, "_fields") else tuple(columns)
    if isinstance(first, torch.Tensor):
        _check_shapes(values, path, names)
        return torch.stack(list(values))
    if isinstance(first, np.ndarray | np.generic):
        _check_shapes(values, path, names)
        return _to_tensor(np.stack(values))
    if isinstance(first, bool | int | float) and all(isinstance(v, bool | int | float) for v in values):
        return torch.tensor(values, dtype=torch.float64 if any(isinstance(v, float) for v in values) else None)
    return list(values)


def _at(path: str) -> str:
    return f" at {path!r}" if path else ""


def _check_shapes(values: Sequence[Any], path: str, names: list[str]) -> None:
    shape = tuple(values[0].shape)
    for value, name in zip(values, names, strict=True):
        found = tuple(value.shape) if hasattr(value, "shape") else type(value).__name__
        if found != shape:
            raise ConfigError(
                f"field {path!r} has shape {shape} in sample {names[0]} and {found} in sample {name}; "
                "a batch needs one shape: resize or pad in decode=, or pass collate="
            )


def _to_tensor(array: np.ndarray) -> Any:
    if array.dtype.kind in "biufc":
        return torch.from_numpy(np.ascontiguousarray(array, array.dtype.newbyteorder("=")))
    return array.tolist()  # text and dates have no tensor
