"""The programs that are compared. Each runs in a process of its own: ``python -m benchmarks.contestants NAME PLACE``.

A contestant is a function that opens the data and returns a function which gives one epoch: an iterator over
(samples, bytes) of each batch. All shuffle, all use batches of 64, all hand out undecoded bytes, all run with the
defaults and the advice of their own documentation, and two processes where they work with processes.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from benchmarks.material import BUCKET
from benchmarks.processes import tree_cpu_seconds
from benchmarks.server import read_stats

BATCH = 64
WORKERS = 2
SEED = 17

Epoch = Callable[[], Iterator[tuple[int, int]]]


@dataclass(frozen=True)
class Place:
    """Where a contestant works.

    `cache` is empty at the start of each run; `kept` lasts over all runs, for an index that is made once. The store's
    address and credentials stand in the environment, where botocore, obstore and s3fs look for them.
    """

    endpoint_url: str
    cache: str
    kept: str
    shards: int
    epochs: int = 2
    epoch_seconds: float = 120.0  # an epoch is broken off after this, and counts by what it gave
    loader: dict[str, Any] = field(default_factory=dict)  # options of bucketfeed's Loader


def bucketfeed_tar(place: Place) -> Epoch:
    """bucketfeed: tar, Loader as it comes, index present."""
    return _bucketfeed(place, "tar", index=f"{place.kept}/tar.index")


def bucketfeed_first(place: Place) -> Epoch:
    """bucketfeed: tar, Loader as it comes, index made in this run."""
    return _bucketfeed(place, "tar", index=None)


def bucketfeed_raw(place: Place) -> Epoch:
    """bucketfeed: raw objects, Loader as it comes, index present."""
    return _bucketfeed(place, "raw", index=f"{place.kept}/raw.index")


def bucketfeed_workers(place: Place) -> Epoch:
    """bucketfeed: tar, Loader with 2 worker processes, index present."""
    return _bucketfeed(place, "tar", index=f"{place.kept}/tar.index", num_workers=WORKERS)


def _bucketfeed(place: Place, folder: str, *, index: str | None, num_workers: int = 0) -> Epoch:
    import bucketfeed as bf

    options = {"num_workers": num_workers, **place.loader}
    loader = bf.Loader(_dataset(place, folder, index), BATCH, shuffle=True, seed=SEED, **options)
    return lambda: map(_size_of_columns, loader)


def dataloader(place: Place) -> Epoch:
    """torch DataLoader over bucketfeed's MapDataset: tar, 2 worker processes, index present."""
    from torch.utils.data import DataLoader

    data = _dataset(place, "tar", f"{place.kept}/tar.index")
    loader = DataLoader(data, BATCH, shuffle=True, num_workers=WORKERS, collate_fn=list, persistent_workers=True)
    return lambda: map(_size_of_samples, loader)


def _dataset(place: Place, folder: str, index: str | None) -> Any:
    import bucketfeed as bf

    cache = bf.DiskCache(place.cache, limit_bytes="100GB")
    url = f"s3://{BUCKET}/{folder}/"
    return bf.open_dataset(url, cache=cache, index=index)


def webdataset(place: Place) -> Epoch:
    """WebDataset: tar over http, 2 worker processes."""
    import webdataset as wds

    urls = f"{place.endpoint_url}/{BUCKET}/tar/{{00000..{place.shards - 1:05d}}}.tar"
    data = wds.WebDataset(urls, shardshuffle=place.shards, seed=SEED).shuffle(1000).batched(BATCH, collation_fn=list)
    loader = wds.WebLoader(data, batch_size=None, num_workers=WORKERS)
    return lambda: map(_size_of_samples, loader)


def litdata_raw(place: Place) -> Epoch:
    """LitData: StreamingRawDataset, raw objects, 2 worker processes, index present."""
    from litdata import StreamingRawDataset
    from torch.utils.data import DataLoader

    _let_litdata_use_http()
    data = StreamingRawDataset(f"s3://{BUCKET}/raw/", cache_dir=f"{place.kept}/litdata-raw")
    loader = DataLoader(data, BATCH, shuffle=True, num_workers=WORKERS, collate_fn=list, persistent_workers=True)
    return lambda: ((len(batch), sum(map(len, batch))) for batch in loader)


def litdata_optimised(place: Place) -> Epoch:
    """LitData: StreamingDataset, its own optimised chunks, 2 worker processes."""
    from litdata import StreamingDataLoader, StreamingDataset

    _let_litdata_use_http()
    data = StreamingDataset(
        f"s3://{BUCKET}/litdata/", cache_dir=place.cache, shuffle=True, seed=SEED, max_cache_size="100GB"
    )
    loader = StreamingDataLoader(data, batch_size=BATCH, num_workers=WORKERS, collate_fn=list, persistent_workers=True)
    return lambda: map(_size_of_samples, loader)


def _let_litdata_use_http() -> None:
    """LitData has no option for a store without TLS."""
    from litdata.streaming import downloader

    downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True


CONTESTANTS: dict[str, Callable[[Place], Epoch]] = {
    "bucketfeed": bucketfeed_tar,
    "bucketfeed-first": bucketfeed_first,
    "bucketfeed-raw": bucketfeed_raw,
    "bucketfeed-workers": bucketfeed_workers,
    "dataloader": dataloader,
    "webdataset": webdataset,
    "litdata-raw": litdata_raw,
    "litdata-optimised": litdata_optimised,
}


def named(name: str) -> Callable[[Place], Epoch]:
    """Return the contestant of this name, of this module or of `benchmarks.rows`."""
    from benchmarks import rows

    return (CONTESTANTS | rows.CONTESTANTS)[name]


def _size_of_columns(batch: dict[str, list[Any]]) -> tuple[int, int]:
    fields = [column for name, column in batch.items() if name != "__key__"]
    return len(batch["__key__"]), sum(_length(value) for column in fields for value in column)


def _size_of_samples(batch: Iterable[dict[str, Any]]) -> tuple[int, int]:
    values = [[value for name, value in sample.items() if not name.startswith("__")] for sample in batch]
    return len(values), sum(_length(value) for sample in values for value in sample)


def _length(value: Any) -> int:
    return len(value) if isinstance(value, bytes | str) else 1


def run(name: str, place: Place) -> Iterator[dict[str, Any]]:
    """Run a contestant; yield a note before each phase ("open", "epoch 1", ...) and its numbers after it.

    Each phase begins when the caller goes on.
    """
    pid = os.getpid()
    read_stats(place.endpoint_url)
    yield {"phase": "open"}
    start = time.perf_counter()
    epoch = named(name)(place)
    opened = time.perf_counter() - start
    yield {"open_seconds": opened, "open_requests": read_stats(place.endpoint_url)["req"]}
    for number in range(1, place.epochs + 1):
        yield {"phase": f"epoch {number}"}
        samples = size = 0
        first = None
        cpu = tree_cpu_seconds(pid)
        start = time.perf_counter()
        for more_samples, more_bytes in epoch():
            if first is None:
                first = time.perf_counter() - start
            samples += more_samples
            size += more_bytes
            if time.perf_counter() - start > place.epoch_seconds:
                break
        seconds = time.perf_counter() - start
        cpu = tree_cpu_seconds(pid) - cpu
        served = read_stats(place.endpoint_url)
        yield {
            "epoch": number,
            "samples": samples,
            "bytes": size,
            "seconds": seconds,
            "first_batch_seconds": first,
            "cpu_seconds": cpu,
            "requests": served["req"],
            "bytes_fetched": served["bytes"],
        }


def main() -> None:
    """Print each note and result of one contestant as a line of JSON."""
    name, place = sys.argv[1], Place(**json.loads(sys.argv[2]))
    for line in run(name, place):
        print(json.dumps(line), flush=True)
        if "phase" in line:
            sys.stdin.readline()
    sys.stdout.flush()
    os._exit(0)  # what a contestant takes to tear down its workers is not measured, and must not hang us


if __name__ == "__main__":
    main()
