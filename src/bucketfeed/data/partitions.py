"""Dask arrays and data frames as data sets with random access."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import cloudpickle
import numpy as np

from bucketfeed.cache.disk import DiskCache
from bucketfeed.data.dataset import CHUNK_BYTES, Decode, MapDataset, _kept
from bucketfeed.data.temporary import temporary_folder
from bucketfeed.errors import ConfigError, ReadError
from bucketfeed.formats.decoded import DecodedReader
from bucketfeed.formats.index import Index, build_index
from bucketfeed.formats.partitions import ArrayRows, FrameRows, Partitions
from bucketfeed.store.manifest import Manifest
from bucketfeed.store.ranges import Buffer, Counter, Range


def from_dask(
    x: Any,
    *,
    decode: Decode | None = None,
    cache: DiskCache | Literal["auto"] | None = "auto",
    progress: bool = True,
) -> MapDataset:
    """Return the rows of a Dask array or data frame as a data set with `len` and random access.

    A partition is computed by the process that needs one of its rows, once a node, and kept in the cache. Rows of a
    data frame, and of an array of unknown chunks, are counted by one pass over all partitions, which fills the cache.
    The graph must give the same values each time, and hold no results that lie in a cluster (`persist`).

    Args:
        x: an array, whose rows along axis 0 are samples with field `data`; or a data frame, with a field a column.
        decode: gets a sample and returns anything.
        cache: a `DiskCache`; "auto" takes the default folder; None a temporary one, gone with this process.
        progress: show a bar where counting takes longer than a second.

    Raises: `ConfigError` for what can't be cut into rows, `DecodeError` for a partition that can't be computed.

    >>> ds = bf.from_dask(dask.array.random.random((1000, 8), chunks=(100, 8)))
    """
    try:
        from dask.base import is_dask_collection, tokenize
    except ImportError as e:
        raise ConfigError("from_dask needs Dask: pip install 'bucketfeed[dask]'") from e
    is_array = hasattr(x, "chunks") and hasattr(x, "rechunk")
    if not is_dask_collection(x) or not (is_array or (hasattr(x, "npartitions") and hasattr(x, "columns"))):
        raise ConfigError(f"from_dask takes a Dask array or data frame, not {type(x).__name__}")
    if is_array:
        x = _in_rows(x)
    token = tokenize(x)
    kept, folder = _kept(cache)
    kept = kept or DiskCache(tempfile.mkdtemp(prefix="shared-", dir=temporary_folder()))
    graph = folder / f"{token}.graph"
    delayed = list(x.to_delayed().ravel()) if is_array else x.to_delayed()
    _publish(graph, cloudpickle.dumps(delayed))
    known: Partitions
    lengths: Sequence[float] = ()
    if is_array:
        known, lengths = ArrayRows(graph, x.dtype.str, tuple(map(int, x.shape[1:]))), x.chunks[0]
        counted = not np.isnan(lengths).any()
        sizes = [int(rows) * known.row_bytes for rows in lengths] if counted else [1] * len(delayed)
    else:
        known, counted, sizes = FrameRows(graph, _columns(x)), False, [1] * len(delayed)
    root = f"dask://{token}/"
    objects = [(f"{root}{number:08}", size, token) for number, size in enumerate(sizes)]
    manifest = Manifest.from_objects(root, objects, folder=folder)
    reader = _Nothing(Counter())
    if counted and isinstance(known, ArrayRows):
        counts = np.array(lengths, np.int64)
        shards = np.repeat(np.arange(len(counts)), counts)
        rows = np.arange(len(shards)) - np.repeat(np.cumsum(counts) - counts, counts)
        row_bytes = np.full(len(shards), known.row_bytes)
        index = Index.write(folder / f"{token}.idx", manifest, known, shards, rows * row_bytes, row_bytes)
    else:
        index = build_index(
            manifest, known, reader, cache=kept, folder=folder, chunk_bytes=CHUNK_BYTES, progress=progress
        )
    kept.indexed()
    return MapDataset(index, DecodedReader(reader, kept, index.chunks(CHUNK_BYTES)), decode)


class _Nothing:
    """The reader beneath partitions: there are no bytes but those that are computed."""

    is_local = False

    def __init__(self, counter: Counter) -> None:
        self.counter = counter

    def read(self, ranges: Sequence[Range]) -> list[Buffer]:
        """Raise, where there is anything to read."""
        if ranges:
            raise ReadError(f"{ranges[0]} is computed, it can't be fetched")
        return []


def _in_rows(x: Any) -> Any:
    if x.ndim == 0 or x.dtype.hasobject or np.isnan(x.shape[1:]).any() or 0 in (x.dtype.itemsize, *x.shape[1:]):
        raise ConfigError(f"a Dask array of {x.dtype}{x.shape} has no rows of a known size: give it a fixed row shape")
    return x.rechunk(dict.fromkeys(range(1, x.ndim), -1)) if x.ndim > 1 else x


def _columns(x: Any) -> tuple[str, ...]:
    columns = tuple(str(name) for name in x.columns)
    if x.ndim != 2 or len(set(columns)) < len(columns) or "__key__" in columns:
        raise ConfigError(f"columns must be different and none '__key__', but are {columns}: rename them")
    return columns


def _publish(path: Path, data: bytes) -> None:
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.name, delete=False) as file:
        file.write(data)
    os.replace(file.name, path)
