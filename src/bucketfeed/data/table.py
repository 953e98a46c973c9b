"""A compact table of labels: columns by name, a few bytes a value, shared by the processes of a node."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from bucketfeed.data.dataset import MapDataset
from bucketfeed.data.loader import Loader
from bucketfeed.errors import ConfigError
from bucketfeed.formats.shared import SharedArray
from bucketfeed.sampling.topology import Topology

_BATCH = 1024
_WORDS = {bool: "?", int: "<i8", float: "<f8"}


class Column:
    """Values of one column: 8 bytes a number, 1 a truth value, text as UTF-8 and all else pickled with 8 bytes more."""

    def __init__(self, values: Sequence[Any]) -> None:
        kinds = {type(value) for value in values}
        kind = kinds.pop() if len(kinds) == 1 else float if kinds == {int, float} else None
        self._ends: SharedArray | None = None
        self._is_text = kind is str
        if kind in _WORDS and not (kind is int and any(not -(2**63) <= value < 2**63 for value in values)):
            self._data = SharedArray(np.array(values, _WORDS[kind]))
            return
        texts = [value.encode("utf-8", "surrogatepass") if kind is str else pickle.dumps(value) for value in values]
        self._data = SharedArray(np.frombuffer(b"".join(texts), np.uint8))
        self._ends = SharedArray(np.cumsum([0, *map(len, texts)]).astype("<i8"))

    def __getitem__(self, row: int) -> Any:
        if self._ends is None:
            return self._data.values[row].item()
        start, stop = self._ends.values[row : row + 2].tolist()
        data = self._data.values[start:stop].tobytes()
        return data.decode("utf-8", "surrogatepass") if self._is_text else pickle.loads(data)


class Table:
    """Rows of labels by number."""

    def __init__(self, columns: Mapping[str, Sequence[Any]]) -> None:
        self._columns = {name: Column(values) for name, values in columns.items()}

    def fields(self, row: int) -> dict[str, Any]:
        """Return the values of a row by column."""
        return {name: column[row] for name, column in self._columns.items()}


def text_of(key: Any) -> str:
    """Return a key as the text that it is compared by: 7 and "7" are the same."""
    return key.decode("utf-8", "surrogateescape") if isinstance(key, bytes) else str(key)


def table_of(labels: Any, on: str) -> tuple[Table, dict[str, int]]:
    """Return the table of a dict by key, a data frame, or a data set of rows with keys in column `on`; and its rows.

    The rows are numbers by key. Raises `ConfigError`.
    """
    if isinstance(labels, MapDataset):
        columns = _columns(_read(labels))
        columns.pop("__key__", None) if on != "__key__" else None
    elif isinstance(labels, Mapping):
        values = [value if isinstance(value, Mapping) else {"label": value} for value in labels.values()]
        return Table(_columns(values)), _rows([*labels])
    elif hasattr(labels, "columns") and hasattr(labels, "iloc"):
        columns = {str(name): labels[name].tolist() for name in labels.columns}
    else:
        raise ConfigError(
            "join takes labels as a dict by key, a pandas data frame or a data set of rows, not "
            f"{type(labels).__name__}"
        )
    if on not in columns:
        raise ConfigError(f"join: the labels have no column {on!r}; name the one with the keys by on=: {[*columns]}")
    rows = _rows(columns.pop(on))
    return Table(columns), rows


def _read(dataset: MapDataset) -> Iterable[Mapping[str, Any]]:
    if not len(dataset):
        return
    with Loader(dataset, _BATCH, tail="uneven", topology=Topology(), collate=list) as loader:
        for samples in loader:
            for sample in samples:
                if not isinstance(sample, Mapping):
                    raise ConfigError(
                        f"join: the labels in {dataset.manifest.url} are {type(sample).__name__}, not rows of columns"
                    )
                yield sample


def _columns(rows: Iterable[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the rows' values by column; None where a row lacks one."""
    columns: dict[str, list[Any]] = {}
    n = 0
    for row in rows:
        for name, value in row.items():
            column = columns.setdefault(str(name), [])
            column.extend([None] * (n - len(column)))
            column.append(value.item() if isinstance(value, np.generic) else value)
        n += 1
    for column in columns.values():
        column.extend([None] * (n - len(column)))
    return columns


def _rows(keys: Sequence[Any]) -> dict[str, int]:
    rows: dict[str, int] = {}
    again: dict[str, list[int]] = {}
    for row, key in enumerate(map(text_of, keys)):
        if rows.setdefault(key, row) != row:
            again.setdefault(key, [rows[key]]).append(row)
    if again:
        key, places = next(iter(again.items()))
        raise ConfigError(
            f"join: {len(again):,} of {len(rows):,} keys come more than once in the labels; the first is {key!r}, in "
            f"rows {', '.join(map(str, places[:5]))} (from 0): leave one row for each"
        )
    return rows
