"""The fields of a batch: the values that one field has over all samples, as tensors of one type, or why not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from bucketfeed.data.collate.values import as_tensor, held, promoted
from bucketfeed.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Field:
    """One field over the samples of a batch: its path (`"text.tokens"`, `"[0].x"`), values, and the samples' names."""

    path: str
    values: Sequence[Any]
    names: Sequence[str]

    def tensors(self, missing: Any = None, *, lists: bool = False) -> list[torch.Tensor] | None:
        """Return the values as tensors of one type, or None where they have none: text, bytes, dates, all None.

        Numbers, arrays and tensors may come together, and lists of numbers where `lists` says so; the type is the one
        that torch promotes them to. `missing` stands for None: a tensor as it is, a number as often as others have.
        Raises `ConfigError` naming both samples where only some of the values are numbers, or no type holds them all.
        """
        missing = by_path(missing, self.path, None)
        found = [self._tensor(number, lists) for number in range(len(self.values))]
        first = next((number for number, tensor in enumerate(found) if tensor is not None), None)
        if first is None:
            return None
        like = found[first]
        assert like is not None
        tensors = []
        for number, (value, tensor) in enumerate(zip(self.values, found, strict=True)):
            if tensor is None and value is None and missing is not None:
                whole = isinstance(missing, torch.Tensor)
                tensor = missing if whole else torch.full_like(like, held(missing, like.dtype, self.path))
            if tensor is None:
                remedy = "make them alike in decode="
                if value is None:
                    remedy = "fill it in decode=, or pass missing= to a function of bf.collate"
                raise self.error(first, number, _kind(self.values[first]), _kind(value), remedy, "is")
            tensors.append(tensor)
        dtype = self._dtype(tensors)
        return [tensor.to(dtype) for tensor in tensors]

    def sequences(self, chosen: frozenset[str] | None, missing: Any = None) -> list[torch.Tensor] | None:
        """Return the values as tensors of one type with at least one dimension each, or None where they are not.

        None too where they are not `chosen`; where they are by name, `ConfigError` tells what they are instead. A value
        None becomes a sequence of length 0 where `missing` is given.
        """
        if chosen is not None and self.path not in chosen:
            return None
        tensors = self.tensors(None if by_path(missing, self.path, None) is None else torch.empty(0), lists=True)
        if tensors is not None:
            like = next((tensor for tensor in tensors if tensor.numel()), tensors[0])
            if like.ndim:
                empty = like.new_empty((0, *like.shape[1:]))  # which an empty list says nothing of
                return [tensor if tensor.numel() or tensor.ndim == like.ndim else empty for tensor in tensors]
        if chosen is not None:
            raise ConfigError(
                f"field {self.path!r} is no sequence: it is {_kind(self.values[0])} in sample {self.names[0]}; name "
                "fields of arrays, tensors or lists of numbers"
            )
        return None

    def reordered(self, order: Sequence[int]) -> Field:
        """Return the field with its samples in another order."""
        return Field(self.path, [self.values[i] for i in order], [self.names[i] for i in order])

    def check_shapes(self, tensors: Sequence[Any], but: int | None = None) -> None:
        """Raise `ConfigError` naming both samples unless all shapes are the same, in all dimensions but `but`."""
        shape = tuple(tensors[0].shape)
        for number, tensor in enumerate(tensors):
            if tensor.shape == shape:
                continue
            found = tuple(tensor.shape)
            if but is None or _without(found, but) != _without(shape, but):
                remedy = "a batch needs one shape: resize in decode=, or pass collate=bf.collate.pad() or ragged()"
                if but is not None:
                    remedy = f"only dimension {but} may differ: make the others alike in decode="
                raise self.error(0, number, shape, found, remedy)

    def error(
        self, first: int, other: int, one: object, two: object, remedy: str, verb: str = "has shape"
    ) -> ConfigError:
        """Return the error that says what two samples have, and what to do."""
        return ConfigError(
            f"field {self.path!r} {verb} {one} in sample {self.names[first]} and {two} in sample {self.names[other]}; "
            f"{remedy}"
        )

    def _tensor(self, number: int, lists: bool) -> torch.Tensor | None:
        try:
            return as_tensor(self.values[number], lists)
        except (TypeError, ValueError, OverflowError) as e:
            raise ConfigError(
                f"field {self.path!r} of sample {self.names[number]} makes no tensor: {e}; convert it in decode="
            ) from e

    def _dtype(self, tensors: Sequence[torch.Tensor]) -> torch.dtype:
        # None and empty lists say nothing of the type.
        telling = [n for n, v in enumerate(self.values) if tensors[n].numel() or not (v is None or isinstance(v, list))]
        if not telling:
            return torch.int64
        dtype = tensors[telling[0]].dtype
        for number in telling:
            other = tensors[number].dtype
            if other is not dtype:
                try:
                    dtype = promoted(dtype, other)
                except RuntimeError:
                    remedy = "no type holds both: make them alike in decode="
                    raise self.error(telling[0], number, dtype, other, remedy, "is") from None
        return dtype


def gathered(samples: Sequence[Any]) -> Any:
    """Return the samples' own form (dicts, tuples, named tuples) with a `Field` in each place.

    Raises `ConfigError` naming the field and both samples where one lacks a field, and where there are no samples.
    """
    if not samples:
        raise ConfigError("a batch needs at least one sample; collate got an empty list")
    return _gathered(Field("", samples, [_name(sample, number) for number, sample in enumerate(samples)]))


def applied(form: Any, function: Callable[[Field], Any]) -> Any:
    """Return `form` with what `function` makes of each of its fields."""
    if isinstance(form, dict):
        return {key: applied(value, function) for key, value in form.items()}
    if isinstance(form, tuple):
        columns = [applied(value, function) for value in form]
        return type(form)(*columns) if hasattr(form, "_fields") else tuple(columns)
    return function(form)


def checked_names(form: Any, names: Sequence[str] | None, caller: str) -> frozenset[str] | None:
    """Return the paths that `names` chooses. Raises `ConfigError` where the samples lack one."""
    if names is None:
        return None
    paths = [field.path for field in _leaves(form)]
    for name in names:
        if name not in paths:
            raise ConfigError(f"{caller}: no field {name!r} in the samples, which have {paths}")
    return frozenset(names)


def names_of(fields: Sequence[str] | str | None, caller: str) -> tuple[str, ...] | None:
    """Return the argument `fields` as a tuple. Raises `ConfigError` for anything but names."""
    if fields is None:
        return None
    names = (fields,) if isinstance(fields, str) else tuple(fields)
    if not names or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"{caller}: fields must be names such as ('tokens',), or None for all, not {fields!r}")
    return names


def _leaves(form: Any) -> Iterator[Field]:
    if isinstance(form, Field):
        yield form
    else:
        for value in form.values() if isinstance(form, dict) else form:
            yield from _leaves(value)


def _gathered(field: Field) -> Any:
    first = field.values[0]
    if isinstance(first, Mapping):
        for value, name in zip(field.values, field.names, strict=True):
            if not isinstance(value, Mapping) or value.keys() != first.keys():
                found = sorted(map(str, value)) if isinstance(value, Mapping) else type(value).__name__
                raise ConfigError(
                    f"samples of one batch have different fields{_at(field.path)}: {field.names[0]} has "
                    f"{sorted(map(str, first))}, {name} has {found}; make them alike in decode=, or pass collate="
                )
        return {key: _gathered(_inner(field, f"{field.path}.{key}" if field.path else str(key), key)) for key in first}
    if isinstance(first, tuple):
        for value, name in zip(field.values, field.names, strict=True):
            if not isinstance(value, tuple) or len(value) != len(first):
                raise ConfigError(
                    f"samples of one batch have different lengths{_at(field.path)}: {field.names[0]} has {len(first)} "
                    f"entries, {name} is {value!r:.80}; make them alike in decode=, or pass collate="
                )
        columns = [_gathered(_inner(field, f"{field.path}[{i}]", i)) for i in range(len(first))]
        return type(first)(*columns) if hasattr(first, "_fields") else tuple(columns)
    return field


def _inner(field: Field, path: str, key: Any) -> Field:
    return Field(path, [value[key] for value in field.values], field.names)


def _name(sample: Any, number: int) -> str:
    key = sample.get("__key__") if isinstance(sample, Mapping) else None
    return repr(key) if isinstance(key, str) else f"number {number} of the batch"


def _at(path: str) -> str:
    return f" at {path!r}" if path else ""


def _kind(value: Any) -> str:
    if value is None:
        return "None"
    shape = f" of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor | np.ndarray) else ""
    return f"{type(value).__name__}{shape}"


def _without(shape: tuple[int, ...], dim: int) -> tuple[int, ...]:
    if not -len(shape) <= dim < len(shape):
        return shape
    dim %= len(shape)
    return shape[:dim] + shape[dim + 1 :]


def by_path(option: Any, path: str, otherwise: Any) -> Any:
    """Return an option that may be one for each field, by its path."""
    return option.get(path, otherwise) if isinstance(option, Mapping) else option
