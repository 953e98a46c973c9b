"""Samples joined with the rows of a table of labels, by key."""

from __future__ import annotations

import logging
import posixpath
from collections.abc import Callable, Iterator
from typing import Any, Literal

import numpy as np

from bucketfeed.data.dataset import MapDataset
from bucketfeed.data.parts import DecodedIndex
from bucketfeed.data.table import Table, table_of, text_of
from bucketfeed.data.views import check_fixed, unchanged, with_fields
from bucketfeed.errors import ConfigError
from bucketfeed.formats.samples import AnyIndex
from bucketfeed.formats.shared import SharedArray
from bucketfeed.store.ranges import Buffer

_log = logging.getLogger(__name__)

_BATCH = 1024
_OF_PATH: dict[str, Callable[[str], str]] = {
    "__key__": lambda path: posixpath.splitext(path)[0],
    "path": lambda path: path,
    "name": posixpath.basename,
    "stem": lambda path: posixpath.splitext(posixpath.basename(path))[0],
}


class JoinedIndex(DecodedIndex):
    """A `DecodedIndex` whose samples also have the columns of their row in a table."""

    def __init__(self, base: AnyIndex, decode: Callable[[Any], Any] | None, table: Table, rows: SharedArray) -> None:
        super().__init__(base, decode)
        self._table = table
        self._rows = rows

    def sample(self, i: int, buffer: Buffer) -> Any:
        """Return sample `i` with its row."""
        fields = self._table.fields(int(self._rows.values[i]))
        return with_fields(super().sample(i, buffer), fields, "join")

    def __reduce__(self) -> tuple[Callable[..., JoinedIndex], tuple[Any, ...]]:
        return type(self), (self.base, self.decode, self._table, self._rows)


def join(
    dataset: MapDataset,
    labels: Any,
    *,
    on: str = "key",
    key: str | Callable[[Any], Any] = "__key__",
    how: Literal["left", "inner"] = "left",
) -> MapDataset:
    """Return `dataset` with the columns of a table of labels as further fields of each sample, found by key.

    The labels are read once, here: afterwards they take 8 bytes a number, and text as it is with 8 bytes more, in files
    that all processes of the node map; while they are read, what they take as Python's values. Keys are compared as
    text. Several samples may share a row. Other rows than those of the samples do no harm.

    Args:
        dataset: of any format. A sample that is no dict becomes field `value`.
        labels: a dict by key (of dicts, or of single values, which become field `label`), a pandas data frame, or
            another data set whose samples are rows (JSONL, CSV, ...).
        on: the labels' column with the keys; it is left out of the samples.
        key: what a sample is found by. Of raw objects, by their names alone: "__key__", the path under the data
            set's URL without its extension; "path", with it; "name", its last part; "stem", that without its extension;
            or a function of the path. Else a field of the sample, or a function of the sample: that reads all samples
            once, undecoded.
        how: what becomes of samples that have no row: an error with "left", left out with "inner".

    Raises `ConfigError` for keys that are missing or come twice in the labels, which names one and how many there are.

    >>> photos = bf.join(bf.open_dataset("s3://b/photos/"), bf.open_dataset("s3://b/labels.csv"), on="file", key="name")
    """
    check_fixed(dataset.index, "join")
    if how not in ("left", "inner"):
        raise ConfigError(f"how must be 'left' or 'inner', not {how!r}")
    table, row_of = table_of(labels, on)
    keys = _keys(dataset, key)
    rows = np.empty(len(dataset), np.int32)
    missing: list[tuple[int, str]] = []
    for i, found in enumerate(map(text_of, keys)):
        rows[i] = row_of.get(found, -1)
        if rows[i] < 0 and not missing:
            missing.append((i, found))
    lacking = int((rows < 0).sum())
    if lacking and (how == "left" or lacking == len(rows)):
        i, first = missing[0]
        raise ConfigError(
            f"join: {lacking:,} of {len(rows):,} samples have no row in the labels; the first is {first!r} "
            f"({dataset.index.range(i)}), the labels have {len(row_of):,} keys such as "
            f"{next(iter(row_of), None)!r}. Say what they are found by with key=, or pass how='inner' to leave "
            "them out"
        )
    if lacking:
        _log.info("join: left out %d of %d samples, which have no row in the labels", lacking, len(rows))
        dataset, rows = dataset.select(rows >= 0), rows[rows >= 0]
    index = JoinedIndex(dataset.index, dataset.decode, table, SharedArray(rows))
    return dataset._with(index=index, decode=None if dataset.decode is None else unchanged)


def _keys(dataset: MapDataset, key: str | Callable[[Any], Any]) -> Iterator[Any]:
    """Yield what each sample is found by."""
    n, name = len(dataset), dataset.index.name
    if n and all(name(i) is not None for i in {0, n - 1}):
        of_path = _OF_PATH.get(key) if isinstance(key, str) else key
        if of_path is not None:
            yield from (of_path(name(i) or "") for i in range(n))
            return
    bare = dataset._with(decode=None, max_errors=None)
    for at in range(0, n, _BATCH):
        for i, sample in enumerate(bare.__getitems__(range(at, min(at + _BATCH, n))), start=at):
            if callable(key):
                yield key(sample)
            elif isinstance(sample, dict) and key in sample:
                yield sample[key]
            else:
                fields = sorted(map(str, sample)) if isinstance(sample, dict) else type(sample).__name__
                raise ConfigError(
                    f"join: sample {i} ({dataset.index.range(i)}) has no field {key!r} to be found by: {fields}"
                )
