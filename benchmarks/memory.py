"""What a large data set costs each further process: its pickled size, and the growth of a forked worker."""

from __future__ import annotations

import multiprocessing
import pickle
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.processes import memory

EPOCH_SAMPLES = 200_000
SHARDS = 50


def measure(work: Path, samples: int, seconds: float) -> dict[str, Any]:
    """Return the numbers and, under "texts", a sentence for each."""
    folder = work / "memory"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    pickled = _pickled_size(folder, samples)
    before, after, read = _forked_growth(folder, EPOCH_SAMPLES, seconds)
    return {
        "pickled_samples": samples,
        "pickled_bytes": pickled,
        "worker_samples": read,
        "worker_private_bytes_at_first_batch": before,
        "worker_private_bytes_at_last_batch": after,
        "texts": [
            f"`pickle.dumps` of a data set of {samples:,} samples: {pickled:,} bytes",
            f"private memory of a forked DataLoader worker over an epoch of {read:,} samples: "
            f"{before / 1e6:.1f} MB at the first batch, {after / 1e6:.1f} MB at the last "
            f"({(after - before) / 1e6:+.1f} MB)",
        ],
    }


def _pickled_size(folder: Path, samples: int) -> int:
    """Pickle a data set of tar shards whose index is real and whose bytes are never read."""
    import bucketfeed as bf
    from bucketfeed.store.readers import open_reader

    url = "s3://bench/large/"
    each = samples // SHARDS
    objects = [(f"{url}{shard:05d}.tar", each * 2048, f"etag-{shard}") for shard in range(SHARDS)]
    manifest = bf.Manifest.from_objects(url, objects, folder=folder)
    shards = np.repeat(np.arange(SHARDS), each)
    starts = np.tile(np.arange(each) * 2048, SHARDS)
    path = folder / "large.index"
    bf.Index.write(path, manifest, "tar", shards, starts, np.full(len(shards), 2048))
    index = bf.Index.open(path, manifest, "tar")
    return len(pickle.dumps(bf.MapDataset(index, open_reader(url))))


def _forked_growth(folder: Path, samples: int, seconds: float) -> tuple[int, int, int]:
    """Return a forked worker's private bytes when it gave its first and its last batch, and the samples it gave."""
    import torch.utils.data

    import bucketfeed as bf

    shard = folder / "small" / "0.tar"
    shard.parent.mkdir()
    _write_small_samples(shard, samples)
    data = bf.open_dataset(shard.parent, cache=bf.DiskCache(folder / "cache", limit_bytes="10GB"))
    loader = torch.utils.data.DataLoader(
        data, 256, shuffle=True, num_workers=1, collate_fn=len, multiprocessing_context="fork"
    )
    before = after = read = 0
    start = time.monotonic()
    for count in loader:
        worker = multiprocessing.active_children()[0].pid
        assert worker is not None
        after = memory(worker, "Private_Dirty") or after
        before = before or after
        read += count
        if time.monotonic() - start > seconds:
            break
    return before, after, read


def _write_small_samples(path: Path, samples: int) -> None:
    """Write a tar of samples of one small member each, much quicker than tarfile does."""
    import tarfile

    with path.open("wb") as file:
        for index in range(samples):
            member = tarfile.TarInfo(f"{index:08d}.txt")
            member.size = 8
            file.write(member.tobuf(tarfile.USTAR_FORMAT) + f"{index:08d}".encode().ljust(512, b"\0"))
        file.write(bytes(1024))
