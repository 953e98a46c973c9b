"""Feed a PyTorch training loop straight from a bucket: lazy, cached, in a resumable order.

>>> import bucketfeed as bf
>>> ds = bf.open_dataset("s3://bucket/train/")
>>> for batch in bf.Loader(ds, batch_size=64, shuffle=True): ...
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from bucketfeed import errors as errors
    from bucketfeed.cache.disk import DiskCache as DiskCache
    from bucketfeed.cache.reader import CachedReader as CachedReader
    from bucketfeed.data import collate as collate
    from bucketfeed.data.arrays import TokenDataset as TokenDataset
    from bucketfeed.data.arrays import open_arrays as open_arrays
    from bucketfeed.data.buckets import LengthBuckets as LengthBuckets
    from bucketfeed.data.collate import default_collate as default_collate
    from bucketfeed.data.concat import concat as concat
    from bucketfeed.data.dataset import MapDataset as MapDataset
    from bucketfeed.data.dataset import open_dataset as open_dataset
    from bucketfeed.data.dataset import order_hash as order_hash
    from bucketfeed.data.join import join as join
    from bucketfeed.data.labels import folder_labels as folder_labels
    from bucketfeed.data.loader import Loader as Loader
    from bucketfeed.data.mix import mix as mix
    from bucketfeed.data.partitions import from_dask as from_dask
    from bucketfeed.data.random import rng as rng
    from bucketfeed.data.stats import Stats as Stats
    from bucketfeed.data.stream import StreamDataset as StreamDataset
    from bucketfeed.data.writing import write_shards as write_shards
    from bucketfeed.formats import decoders as decoders
    from bucketfeed.formats.delimited import Csv as Csv
    from bucketfeed.formats.delimited import Tsv as Tsv
    from bucketfeed.formats.index import Index as Index
    from bucketfeed.formats.index import build_index as build_index
    from bucketfeed.formats.lines import Jsonl as Jsonl
    from bucketfeed.formats.lines import Text as Text
    from bucketfeed.formats.parquet import Parquet as Parquet
    from bucketfeed.sampling.cursor import Cursor as Cursor
    from bucketfeed.sampling.division import Division as Division
    from bucketfeed.sampling.order import Order as Order
    from bucketfeed.sampling.topology import Topology as Topology
    from bucketfeed.store.manifest import Manifest as Manifest
    from bucketfeed.store.ranges import Range as Range
    from bucketfeed.store.ranges import RangeReader as RangeReader
    from bucketfeed.store.readers import open_reader as open_reader

# Where each public name lives. Loaded when first touched, so that `import bucketfeed` loads no torch.
_HOME = {
    "CachedReader": "cache.reader",
    "Csv": "formats.delimited",
    "Cursor": "sampling.cursor",
    "DiskCache": "cache.disk",
    "Division": "sampling.division",
    "Index": "formats.index",
    "Jsonl": "formats.lines",
    "LengthBuckets": "data.buckets",
    "Loader": "data.loader",
    "Manifest": "store.manifest",
    "MapDataset": "data.dataset",
    "Order": "sampling.order",
    "Parquet": "formats.parquet",
    "Range": "store.ranges",
    "RangeReader": "store.ranges",
    "Stats": "data.stats",
    "StreamDataset": "data.stream",
    "Text": "formats.lines",
    "TokenDataset": "data.arrays",
    "Topology": "sampling.topology",
    "Tsv": "formats.delimited",
    "build_index": "formats.index",
    "concat": "data.concat",
    "collate": "data",
    "decoders": "formats",
    "default_collate": "data.collate",
    "errors": "",
    "folder_labels": "data.labels",
    "from_dask": "data.partitions",
    "join": "data.join",
    "mix": "data.mix",
    "open_arrays": "data.arrays",
    "open_dataset": "data.dataset",
    "open_reader": "store.readers",
    "order_hash": "data.dataset",
    "rng": "data.random",
    "write_shards": "data.writing",
}

__all__ = [*_HOME, "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'bucketfeed' has no attribute {name!r}")
    home = f"bucketfeed.{_HOME[name]}".rstrip(".")
    if name in ("collate", "decoders", "errors"):  # modules themselves
        value: Any = importlib.import_module(f"{home}.{name}")
    else:
        value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
