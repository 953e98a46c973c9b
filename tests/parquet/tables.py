"""Parquet files for tests: written to a folder, opened, and read in every way there is."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

import bucketfeed as bf
from bucketfeed.formats.parquet_reader import ParquetReader
from bucketfeed.testing.readers import MemoryReader, RecordingReader


def put(path: Path, table: pa.Table | dict[str, Any], **options: Any) -> Path:
    """Write a table to `path` and return the folder that holds it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table if isinstance(table, pa.Table) else pa.table(table), path, **options)
    return path.parent


def opened(where: Path, cache: Path | None = None, **options: Any) -> bf.MapDataset:
    """Return the data set, with options of `bf.Parquet`, its cache beside the folder."""
    kept = bf.DiskCache(cache or where.with_name(where.name + "-cache"), "1GB")
    return bf.open_dataset(where, format=bf.Parquet(**options), cache=kept, progress=False)


def rows(dataset: Any) -> list[dict[str, Any]]:
    """Return all samples without keys, the same one by one, at once, backwards and in a pickled copy."""
    one_by_one = [told(sample) for sample in dataset]
    everything = list(range(len(dataset)))
    assert [told(sample) for sample in dataset.__getitems__(everything)] == one_by_one
    assert [told(dataset[i]) for i in reversed(everything)] == one_by_one[::-1]
    assert [told(sample) for sample in pickle.loads(pickle.dumps(dataset))] == one_by_one
    return one_by_one


def told(sample: dict[str, Any]) -> dict[str, Any]:
    """Return a sample with arrays as lists, which can be compared, and without its key."""
    return {
        name: value.tolist() if hasattr(value, "tolist") and value.shape else value
        for name, value in sample.items()
        if name != "__key__"
    }


def batches(dataset: bf.MapDataset, size: int = 4, **options: Any) -> list[Any]:
    """Return the batches of one epoch."""
    with bf.Loader(dataset, size, tail="uneven", **options) as loader:
        return list(loader)


def remote(folder: Path, cache: Path, **options: Any) -> tuple[bf.MapDataset, RecordingReader]:
    """Return the files of a folder as a data set that is not on this machine, and what is asked of its store."""
    dataset = opened(folder, cache, **options)
    manifest = dataset.manifest
    objects = {manifest.object_url(i): (folder / manifest.key(i)).read_bytes() for i in range(len(manifest))}
    reader = RecordingReader(MemoryReader(objects))
    dataset.reader = ParquetReader(reader, bf.DiskCache(cache, "1GB"), dataset.index)
    return dataset, reader


def bytes_of(table: pa.Table, **options: Any) -> bytes:
    """Return a table as the bytes of a file."""
    sink = io.BytesIO()
    pq.write_table(table, sink, **options)
    return sink.getvalue()
