"""What the values of Arrow columns become: Python objects in samples, arrays in batches."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.types as kind  # type: ignore[import-untyped]

# By kind of type: numpy's kind, and the whole numbers that values are kept as.
_TIMES: dict[Callable[[pa.DataType], bool], tuple[str, pa.DataType]] = {
    kind.is_timestamp: ("M8", pa.int64()),
    kind.is_date64: ("M8", pa.int64()),
    kind.is_date32: ("M8", pa.int32()),
    kind.is_duration: ("m8", pa.int64()),
    kind.is_time64: ("m8", pa.int64()),
    kind.is_time32: ("m8", pa.int32()),
}
_UNITS = {"date32[day]": "D", "date64[ms]": "ms"}


class NoValueError(Exception):
    """A null where an array needs a value; says in which row."""

    def __init__(self, row: int) -> None:
        super().__init__(row)
        self.row = row


def plain_type(type: pa.DataType) -> pa.DataType:
    """Return the type of the same values without dictionaries, names of extensions, and what is said of nulls."""
    if isinstance(type, pa.BaseExtensionType):
        return plain_type(type.storage_type)
    if kind.is_dictionary(type):
        return plain_type(type.value_type)
    if kind.is_struct(type):
        return pa.struct([pa.field(field.name, plain_type(field.type)) for field in type])
    if kind.is_map(type):
        return pa.map_(plain_type(type.key_type), plain_type(type.item_type))
    if kind.is_fixed_size_list(type):
        return pa.list_(plain_type(type.value_type), type.list_size)
    if kind.is_list(type):
        return pa.list_(plain_type(type.value_type))
    if kind.is_large_list(type):
        return pa.large_list(plain_type(type.value_type))
    return type


def python(array: pa.Array) -> list[Any]:
    """Return the values as Python objects, without loss: None for null, dicts for structs and maps, lists for lists.

    Times in nanoseconds are `numpy.datetime64` and `timedelta64`, lists of one fixed length of numbers are arrays.
    """
    type = array.type
    if kind.is_struct(type):
        members = [python(member) for member in array.flatten()]
        names = [field.name for field in type]
        rows = [dict(zip(names, values, strict=True)) for values in zip(*members, strict=True)]
        return _nulled(rows or [{} for _ in range(len(array))], array)
    if kind.is_map(type):
        pairs = list(zip(python(array.keys), python(array.items), strict=True))
        return _nulled([dict(pairs[a:b]) for a, b in _borders(array)], array)
    if kind.is_fixed_size_list(type):
        filled = array.flatten()
        if _is_number(type.value_type) and not filled.null_count:
            lists = iter(numbers(filled).reshape(len(array) - array.null_count, type.list_size))
            return [next(lists) if there else None for there in array.is_valid().to_pylist()]
        values = python(_flat(array))
        return _nulled([values[a : a + type.list_size] for a in _steps(array)], array)
    if kind.is_list(type) or kind.is_large_list(type):
        values = python(array.values)
        return _nulled([values[a:b] for a, b in _borders(array)], array)
    if getattr(type, "unit", None) == "ns":  # finer than Python's own times
        return _nulled(list(_times(array)), array)
    if kind.is_string(type) or kind.is_binary(type) or kind.is_large_string(type) or kind.is_large_binary(type):
        found: list[Any] = array.to_numpy(zero_copy_only=False).tolist()  # several times quicker than to_pylist
    elif _is_number(type) and not array.null_count:
        found = numbers(array).tolist()
    else:
        found = array.to_pylist()
    return found


def numpy(array: pa.Array) -> Any:
    """Return the values of a column as an array, or as a list where they have no array.

    Numbers, dates and times are arrays of shape (rows,), lists of one fixed length of them (rows, length); other lists
    of them are a list of arrays, None for null. All else is a list of Python objects. Raises `NoValueError` for a null
    in an array.
    """
    type = array.type
    if _is_number(type) or _time(type) is not None:
        _check(array)
        return numbers(array) if _is_number(type) else _times(array)
    if kind.is_fixed_size_list(type) and isinstance(inner := _inner(array, _flat), np.ndarray):
        _check(array)
        return inner.reshape(len(array), type.list_size, *inner.shape[1:])
    if kind.is_list(type) or kind.is_large_list(type):
        inner = _inner(array, lambda whole: whole.values)
        if isinstance(inner, np.ndarray):
            return _nulled([inner[a:b] for a, b in _borders(array)], array)
    return python(array)


def numbers(array: pa.Array) -> np.ndarray:
    """Return numbers or truth values without nulls as an array of their own type, in memory of its own."""
    return np.array(array.to_numpy(zero_copy_only=False))


def _inner(array: pa.Array, of: Callable[[pa.Array], pa.Array]) -> Any:
    values = of(array)
    try:
        return numpy(values) if _has_array(values.type) else None
    except NoValueError as e:
        starts = _steps(array) if kind.is_fixed_size_list(array.type) else [a for a, _ in _borders(array)]
        raise NoValueError(int(np.searchsorted(starts, e.row, side="right")) - 1) from e


def _has_array(type: pa.DataType) -> bool:
    if kind.is_fixed_size_list(type):
        return _has_array(type.value_type)
    return _is_number(type) or _time(type) is not None


def _check(array: pa.Array) -> None:
    if array.null_count:
        raise NoValueError(int(np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False))[0]))


def _is_number(type: pa.DataType) -> bool:
    return bool(kind.is_integer(type) or kind.is_floating(type) or kind.is_boolean(type))


def _time(type: pa.DataType) -> tuple[str, pa.DataType] | None:
    return next((found for is_kind, found in _TIMES.items() if is_kind(type)), None)


def _times(array: pa.Array) -> np.ndarray:
    """Return dates or times as numpy's, which are anything where there is null."""
    found = _time(array.type)
    assert found is not None
    unit = _UNITS.get(str(array.type)) or array.type.unit
    whole = array.view(found[1]).fill_null(0).to_numpy(zero_copy_only=False)
    return np.array(whole, np.int64).view(f"{found[0]}[{unit}]")


def _nulled(values: list[Any], array: pa.Array) -> list[Any]:
    if array.null_count:
        for row in np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False)).tolist():
            values[row] = None
    return values


def _borders(array: pa.Array) -> list[tuple[int, int]]:
    """Return where each list or map begins and ends among all values."""
    return list(itertools.pairwise(array.offsets.to_pylist()))


def _steps(array: pa.Array) -> list[int]:
    return list(range(0, len(array) * array.type.list_size, array.type.list_size))


def _flat(array: pa.Array) -> pa.Array:
    """Return the values of lists of one fixed length, with those beneath null lists."""
    size = array.type.list_size
    return array.values.slice(array.offset * size, len(array) * size)
