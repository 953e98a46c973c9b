"""The stock DataLoader in every start method, with the store used (and in use) in the parent before."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest
from torch.utils.data import DataLoader, Subset
from written import payload

import bucketfeed as bf

START_METHODS = ["fork", "forkserver", "spawn"]
SAMPLES = 40


@pytest.fixture
def bucket_dataset(bucket, tmp_path: Path) -> bf.MapDataset:
    for number in range(SAMPLES):
        bucket.put(f"train/{number:05}.bin", payload(number))
    return bf.open_dataset(
        bucket.url + "train/",
        storage_options=bucket.storage_options,
        cache=bf.DiskCache(tmp_path / "cache", "10MB"),
    )


def collected(batches) -> dict[str, bytes]:
    return {key: data for batch in batches for key, data in zip(batch["__key__"], batch["bin"], strict=True)}


@pytest.mark.parametrize("start_method", START_METHODS)
@pytest.mark.parametrize("cached", [True, False])
def test_workers_read_right_bytes_although_the_parent_used_the_store_before_c014(
    bucket_dataset: bf.MapDataset, bucket, start_method: str, cached: bool
):
    ds = bucket_dataset
    if not cached:
        ds = bf.open_dataset(bucket.url + "train/", storage_options=bucket.storage_options, cache=None)
    expected = {f"{n:05}": payload(n) for n in range(SAMPLES)}
    assert ds[0]["bin"] == payload(0)
    stop = threading.Event()

    def keep_reading() -> None:
        uncached = bf.open_reader(ds.manifest.url, bucket.storage_options)
        while not stop.is_set():
            uncached.read([ds.manifest.range(i) for i in range(8)])

    reading = threading.Thread(target=keep_reading)
    reading.start()
    try:
        loader = DataLoader(
            ds,
            batch_size=8,
            shuffle=True,
            num_workers=2,
            collate_fn=bf.default_collate,
            multiprocessing_context=start_method,
            timeout=60,
        )
        for _ in range(2):
            assert collected(loader) == expected
    finally:
        stop.set()
        reading.join(timeout=60)


def test_a_subset_of_a_forked_parents_loader_works_beside_our_own(bucket_dataset: bf.MapDataset):
    ours = bf.Loader(bucket_dataset, batch_size=8, shuffle=True)
    it = iter(ours)
    next(it)
    stock = DataLoader(
        Subset(bucket_dataset, range(10)),
        batch_size=5,
        num_workers=1,
        multiprocessing_context="fork",
        collate_fn=bf.default_collate,
        timeout=60,
    )
    assert len(collected(stock)) == 10
    assert len(list(it)) == len(ours) - 1


MEASURE = """
import os, sys
import numpy as np
from torch.utils.data import DataLoader, Dataset
import bucketfeed as bf

def private_bytes():
    with open("/proc/self/smaps_rollup") as lines:
        return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Private_"))

class Measured(Dataset):
    def __init__(self, inner):
        self.inner = inner
    def __len__(self):
        return len(self.inner)
    def __getitem__(self, item):
        self.inner.index.locate(np.array([item]))
        self.inner.index.range(item)
        return os.getpid(), private_bytes() if item % 1000 == 0 else 0

folder, samples = sys.argv[1], int(sys.argv[2])
objects = ((f"memory://set/{n:012}.jpg", 1000, "") for n in range(samples))
manifest = bf.Manifest.from_objects("memory://set/", objects, folder=folder)
index = bf.build_index(manifest, "raw", bf.open_reader("memory://set/"), folder=folder)
ds = Measured(bf.MapDataset(index, bf.open_reader("memory://set/")))
loader = DataLoader(ds, batch_size=1000, num_workers=2, multiprocessing_context="fork", timeout=60)
seen = {}
for pids, sizes in loader:
    for pid, size in zip(pids.tolist(), sizes.tolist()):
        if size:
            seen.setdefault(pid, []).append(size)
print(max(sizes[-1] - sizes[1] for sizes in seen.values()), len(seen))
"""


def test_forked_workers_private_memory_does_not_grow_with_the_samples_they_look_up_c040(tmp_path: Path):
    # In a process of its own: the garbage collector of a worker would copy the heap of this test session.
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path), "500000"], capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr
    growth, workers = map(int, done.stdout.split())
    assert workers == 2
    assert growth < 5_000_000
