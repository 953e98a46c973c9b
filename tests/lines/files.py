"""Files of lines for tests: written to a folder, opened, and read in every way there is."""

from __future__ import annotations

import bz2
import gzip
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import zstandard

import bucketfeed as bf

PACKED = {
    "": lambda data: data,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".zst": lambda data: zstandard.ZstdCompressor().compress(data),
}


def written(folder: Path, **files: bytes) -> Path:
    """Return `folder` with a file for each argument; `a_jsonl` is called `a.jsonl`."""
    return put(folder, {name.replace("_", "."): data for name, data in files.items()})


def put(folder: Path, files: Mapping[str, bytes]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


def opened(folder: Path, **options: Any) -> bf.MapDataset:
    """Return the data set, with its cache beside the folder."""
    cache = bf.DiskCache(folder.with_name(folder.name + "-cache"), "1GB")
    return bf.open_dataset(folder, **{"cache": cache, "progress": False, **options})


def fields(dataset: Any, name: str) -> list[Any]:
    """Return one field of all samples, which are the same one by one, at once, backwards and in a pickled copy."""
    one_by_one = [sample[name] for sample in dataset]
    everything = list(range(len(dataset)))
    assert [sample[name] for sample in dataset.__getitems__(everything)] == one_by_one
    assert [dataset[i][name] for i in reversed(everything)] == one_by_one[::-1]
    assert [sample[name] for sample in pickle.loads(pickle.dumps(dataset))] == one_by_one
    return one_by_one


def loaded(dataset: bf.MapDataset, name: str, **options: Any) -> list[Any]:
    """Return one field of all samples as a Loader gives them."""
    with bf.Loader(dataset, batch_size=4, tail="uneven", collate=list, **options) as loader:
        return [sample[name] for batch in loader for sample in batch]
