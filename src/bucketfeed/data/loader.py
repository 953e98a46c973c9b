"""The loader: batches in a global, resumable order, read ahead of the training loop."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from tqdm.auto import tqdm

from bucketfeed.data.assemble import Assembler, pinned
from bucketfeed.data.buckets import LengthBuckets
from bucketfeed.data.collate import default_collate
from bucketfeed.data.dataset import CHUNK_BYTES, STREAMS, MapDataset
from bucketfeed.data.feed import Feed, Taken, Task, ThreadFeed
from bucketfeed.data.plan import Plan
from bucketfeed.data.skip import Skips
from bucketfeed.data.stats import Stats
from bucketfeed.data.workers import WorkerFeed
from bucketfeed.errors import ConfigError
from bucketfeed.sampling.cursor import Cursor
from bucketfeed.sampling.division import Tail
from bucketfeed.sampling.topology import Topology
from bucketfeed.store.ranges import Counts
from bucketfeed.store.sizes import parse_size
from bucketfeed.store.whole import whole

READ_AHEAD_BYTES = 128 << 20
_MAX_THREADS = 8


class Loader:
    """Batches of a `MapDataset`, one epoch for each time it is iterated.

    Reading and decoding run in threads of this process by default; `num_workers` moves them to processes, for
    decode functions that hold the GIL. The order depends on (seed, epoch, streams, chunk_bytes) and the data alone;
    rank r of w takes every w-th position of it. `state_dict` says where the loop stands, in the middle of an epoch
    too, and fits any world size and batch size.

    Args:
        dataset: made by `open_dataset`.
        batch_size: samples a batch, on this rank.
        batches: in the place of batch_size: a `LengthBuckets`, for batches of samples of about one length.
        shuffle: a new order each epoch, or the data set's own.
        seed: of the order, and of `bucketfeed.rng`.
        tail: what happens to samples that do not fill a batch on every rank: "drop" leaves them out of this epoch,
            "pad" repeats some from the epoch's beginning, "uneven" gives shorter and fewer batches to some ranks.
        topology: this rank and the world's size; found from torch.distributed or torchrun where None.
        num_workers: processes, started by forkserver; functions travel by cloudpickle.
        num_threads: decoding threads (of each worker); by default one a core up to 8, but 1 in workers and where
            the data set has no decode function.
        collate: gets the list of samples and returns the batch; see `default_collate`.
        read_ahead_bytes: bound on bytes held or being fetched ahead of the loop (int or "256MiB").
        streams: how many chunks the order interleaves; more mixes better and keeps more open.
        chunk_bytes: how much one request fetches.
        pin_memory: put tensors in page-locked memory, where there is a GPU.
        progress: show a bar over the epoch's batches.

    >>> loader = bf.Loader(ds, batch_size=64, shuffle=True, seed=17)
    >>> for batch in loader: ...
    """

    def __init__(
        self,
        dataset: MapDataset,
        batch_size: int | None = None,
        *,
        batches: LengthBuckets | None = None,
        shuffle: bool = False,
        seed: int = 0,
        tail: Tail = "drop",
        topology: Topology | None = None,
        num_workers: int = 0,
        num_threads: int | None = None,
        collate: Callable[[Sequence[Any]], Any] | None = None,
        read_ahead_bytes: int | str | None = None,
        streams: int | None = None,
        chunk_bytes: int | str | None = None,
        pin_memory: bool = False,
        progress: bool = False,
    ) -> None:
        if not isinstance(dataset, MapDataset):
            raise ConfigError(f"Loader takes what bucketfeed.open_dataset returns, not {type(dataset).__name__}")
        if topology is not None and not isinstance(topology, Topology):
            raise ConfigError(f"topology must be a bucketfeed.Topology(rank, world_size) or None, not {topology!r}")
        if collate is not None and not callable(collate):
            raise ConfigError(f"collate must be a function of a list of samples, or None, not {collate!r}")
        if isinstance(dataset.index.batches, str) and dataset.decode is not None:
            raise ConfigError(
                f"batch_format={dataset.index.batches!r} gives whole batches, but decode= (or map) is called on single "
                "samples: leave one of the two out, or pass collate=, which gets the batch"
            )
        chunk = CHUNK_BYTES if chunk_bytes is None else parse_size(chunk_bytes, "chunk_bytes")
        ahead = READ_AHEAD_BYTES if read_ahead_bytes is None else parse_size(read_ahead_bytes, "read_ahead_bytes")
        num_workers = whole("num_workers", num_workers, 0)
        seed = whole("seed", seed, 0)
        chunk = whole("chunk_bytes", chunk, 1)
        streams = whole("streams", STREAMS if streams is None else streams, 1)
        buckets = None
        if batches is None and batch_size is not None:
            batch_size = whole("batch_size", batch_size, 1)
        elif batch_size is None and isinstance(batches, LengthBuckets):
            buckets = batches.over(dataset, chunk)
            batch_size = buckets.size
        else:
            raise ConfigError(
                f"Loader takes batch_size, or batches=bf.LengthBuckets(...) in its place, not {batch_size!r} and "
                f"{batches!r}"
            )
        if not isinstance(shuffle, bool):
            raise ConfigError(f"shuffle must be True or False, not {shuffle!r}")
        if num_threads is None:
            # Without a decode function there is little but Python to run, and threads would only wait for each other.
            alone = num_workers or dataset.decode is None
            num_threads = 1 if alone else min(_MAX_THREADS, os.cpu_count() or 1)
        num_threads = whole("num_threads", num_threads, 1)
        self.dataset = dataset
        self.batch_size = batch_size
        self._plan = Plan(
            chunks=dataset.chunks(chunk),
            fingerprint=dataset.index.fingerprint,
            length=len(dataset),
            batch_size=batch_size,
            topology=Topology.detect() if topology is None else topology,
            tail=tail,
            shuffle=shuffle,
            seed=seed,
            streams=streams,
            chunk_bytes=chunk,
            buckets=buckets,
        )
        self._plan.division(0)  # checks that there is a batch to give
        self._num_workers = num_workers
        self._pin = pin_memory and torch.cuda.is_available()
        # Workers share what one of them has fetched through files: those of the cache, else temporary ones.
        shared = dataset.with_shared_files(4 * ahead) if num_workers > 1 else dataset
        assembler = Assembler(shared, collate or default_collate, seed, self._pin and not num_workers)
        self._task = Task(assembler, self._plan, ahead // max(1, num_workers), num_threads)
        self._progress = progress
        self._epoch = self._position = 0
        self._going_on = True  # whether the next iteration starts at the position, not at the next epoch
        self._feed: Feed | None = None
        self._feed_pid = os.getpid()
        self._fed: tuple[int, int] | None = None  # epoch and position of the batch that the feed gives next
        self._run = 0
        self._stats = Stats()
        self._baseline = dataset.reader.counter.counts()
        self._worker_counts = Counts()
        self._skips = Skips(dataset.max_errors or 0)

    @property
    def epoch(self) -> int:
        """The epoch that the loop is in, or that the next iteration gives. Set it to start another one."""
        return self._epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self._seek(whole("epoch", epoch, 0), 0)

    @property
    def topology(self) -> Topology:
        """This rank and the world's size."""
        return self._plan.topology

    def __len__(self) -> int:
        """Return the number of batches of a whole epoch on this rank; the epoch the loop is in, where they differ."""
        return len(self._plan.division(self._epoch))

    def __iter__(self) -> Iterator[Any]:
        """Start one epoch: the one a loaded state stands in, the one set, else the next.

        An epoch that was broken off counts as over, as with torch's DataLoader, so that the next one differs.
        """
        if not self._going_on:
            self._seek(self._epoch + 1, 0)
        self._run += 1
        return self._iterate(self._run)

    def _iterate(self, run: int) -> Iterator[Any]:
        batches = len(self._plan.division(self._epoch, self._position))
        with tqdm(
            total=len(self),
            initial=len(self) - batches,
            desc=f"epoch {self._epoch}",
            unit="batch",
            disable=not self._progress,
        ) as bar:
            then = time.perf_counter()
            for _ in range(batches):
                if run != self._run:
                    raise ConfigError("this epoch was ended by another iteration of the same Loader; use two Loaders")
                feed = self._feed_at_position()
                asked = time.perf_counter()
                self._fed = None  # a batch that fails is asked for again by whoever goes on at this position
                taken = next(feed)
                now = time.perf_counter()
                self._skips.add(taken.made.failures)
                self._position, self._going_on = taken.consumed, False
                self._fed = (self._epoch, taken.consumed)
                self._count(taken, wait_seconds=now - asked, seconds=now - then)
                then = now
                bar.update()
                yield pinned(taken.made.batch) if self._pin and self._num_workers else taken.made.batch
            self._count(None, seconds=time.perf_counter() - then)
            self._epoch, self._position, self._going_on = self._epoch + 1, 0, True
            self._fed = (self._epoch, 0)  # the feed goes on into it by itself

    def state_dict(self) -> dict[str, Any]:
        """Return where the loop stands: a few JSON values, good for any world size and batch size."""
        return self._plan.cursor(self._epoch, self._position).to_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken: the next iteration gives the rest of its epoch.

        Raises `ResumeError` where the state belongs to other data, another order or another version.
        """
        cursor = Cursor.from_dict(state)
        cursor.check(self._plan.cursor(0, 0))
        if self._plan.division(cursor.epoch, cursor.position).is_over:  # taken after the last batch
            self._seek(cursor.epoch + 1, 0)
        else:
            self._seek(cursor.epoch, cursor.position)

    def stats(self) -> Stats:
        """Return totals since this loader was made; all its processes counted."""
        counts = self.dataset.reader.counter.counts() - self._baseline + self._worker_counts
        seen = self._stats
        return Stats.of(
            counts,
            samples=seen.samples,
            skipped=seen.skipped,
            batches=seen.batches,
            wait_seconds=seen.wait_seconds,
            seconds=seen.seconds,
        )

    def close(self) -> None:
        """End reading ahead and the worker processes. Iterating again starts them anew."""
        if self._feed is not None:
            self._feed.close()
            self._feed = None

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        topology = self._plan.topology
        return (
            f"Loader({self.dataset.manifest.url!r}, batches={len(self)}, batch_size={self.batch_size}, "
            f"rank={topology.rank}/{topology.world_size}, epoch={self._epoch}, position={self._position})"
        )

    def _seek(self, epoch: int, position: int) -> None:
        self._epoch, self._position, self._going_on = epoch, position, True
        self._run += 1

    def _feed_at_position(self) -> Feed:
        if self._feed is None or self._feed_pid != os.getpid():  # after a fork, threads and workers are the parent's
            self._feed = WorkerFeed(self._task, self._num_workers) if self._num_workers else ThreadFeed(self._task)
            self._feed_pid, self._fed = os.getpid(), None
        if self._fed != (self._epoch, self._position):
            self._feed.start(self._epoch, self._position)
        return self._feed

    def _count(self, taken: Taken | None, *, seconds: float, wait_seconds: float = 0.0) -> None:
        if taken is not None:
            self._worker_counts += taken.counts
        self._stats = replace(
            self._stats,
            samples=self._stats.samples + (taken.made.samples if taken else 0),
            skipped=self._stats.skipped + (len(taken.made.failures) if taken else 0),
            batches=self._stats.batches + (1 if taken else 0),
            wait_seconds=self._stats.wait_seconds + wait_seconds,
            seconds=self._stats.seconds + seconds,
        )
