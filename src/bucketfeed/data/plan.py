"""Which samples one rank takes, batch by batch and epoch after epoch, and what it must hold to make them.

A plan is pure arithmetic on the index: it reads nothing and holds no array of n entries.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from bucketfeed.data.buckets import BucketDivision, Buckets, EpochBatches
from bucketfeed.data.parts import MixChunks
from bucketfeed.formats.samples import AnyChunks
from bucketfeed.sampling.cursor import Cursor
from bucketfeed.sampling.division import Division, Tail
from bucketfeed.sampling.mix import AnyOrder, MixOrder
from bucketfeed.sampling.order import Order
from bucketfeed.sampling.topology import Topology

Ints = NDArray[np.int64]

# Positions worked out in one go: enough to spread numpy's call overhead, small enough to start at once.
_BLOCK_POSITIONS = 8192
_FIRST_BLOCK_POSITIONS = 1024

AnyDivision: TypeAlias = Division | BucketDivision


def order_of(chunks: AnyChunks, *, seed: int, epoch: int, streams: int, shuffle: bool) -> AnyOrder:
    """Return the global order of `epoch` over the samples that `chunks` hold; a mix brings its own."""
    if isinstance(chunks, MixChunks):
        return MixOrder(
            chunks.mix,
            [part.counts for part in chunks.parts],
            seed=seed,
            epoch=epoch,
            streams=streams,
            shuffle=shuffle,
        )
    return Order(chunks.counts, seed=seed, epoch=epoch, streams=streams, shuffle=shuffle)


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """One batch: its samples and, per sample, the chunk it lies in, who reads that chunk, and until when.

    `consumed` is the cursor's position once this batch is done; the arrays have one entry a sample.
    """

    epoch: int
    number: int
    consumed: int
    samples: Ints
    chunks: Ints
    streams: Ints
    last: Ints
    end: int  # the position up to which nothing more is wanted


@dataclass(frozen=True, slots=True)
class Plan:
    """The whole future of one rank. The order depends on (seed, epoch, streams, chunks) and nothing else."""

    chunks: AnyChunks
    fingerprint: str
    length: int
    batch_size: int
    topology: Topology
    tail: Tail
    shuffle: bool
    seed: int
    streams: int
    chunk_bytes: int
    buckets: Buckets | None = None

    def order(self, epoch: int) -> AnyOrder:
        """Return the global order of `epoch`."""
        return order_of(self.chunks, seed=self.seed, epoch=epoch, streams=self.streams, shuffle=self.shuffle)

    def division(self, epoch: int, start: int = 0) -> AnyDivision:
        """Return this rank's share of an epoch from the cursor's position `start` on."""
        if self.buckets is not None:
            return BucketDivision(_batches(self, epoch), self.topology, self.tail, start)
        return Division(self.length, self.batch_size, self.topology, self.tail, start=start)

    def cursor(self, epoch: int, position: int) -> Cursor:
        """Return the cursor that says: `position` samples, or batches of buckets, of `epoch` are done by all ranks."""
        return Cursor(
            fingerprint=self.fingerprint,
            seed=self.seed,
            epoch=epoch,
            position=position,
            streams=self.streams,
            chunk_bytes=self.chunk_bytes,
            shuffle=self.shuffle,
            length=self.length,
            batches="" if self.buckets is None else f"{self.buckets.name}, tail={self.tail}",
        )

    def batches(self, epoch: int, start: int = 0) -> Iterator[BatchPlan]:
        """Yield the batches from `start` in `epoch` on, and then those of all later epochs, without end.

        Ends only where an epoch has nothing for this rank.
        """
        block = _FIRST_BLOCK_POSITIONS
        while True:
            division, order = self.division(epoch, start), self.order(epoch)
            first = 0
            while first < len(division):
                numbers = range(first, min(first + max(1, block // self.batch_size), len(division)))
                yield from self._block(epoch, division, order, numbers)
                first, block = numbers.stop, _BLOCK_POSITIONS
            if start == 0 and not len(division):
                return
            epoch, start = epoch + 1, 0

    def _block(self, epoch: int, division: AnyDivision, order: AnyOrder, numbers: range) -> Iterator[BatchPlan]:
        positions = [division.positions(number) for number in numbers]
        together = np.concatenate(positions)
        samples = order.samples(together)
        chunks, streams, last = order.leases(together)
        stop = 0
        for number, own in zip(numbers, positions, strict=True):
            part = slice(stop, stop := stop + len(own))
            yield BatchPlan(
                epoch=epoch,
                number=number,
                consumed=division.consumed(number),
                samples=samples[part],
                chunks=chunks[part],
                streams=streams[part],
                last=last[part],
                end=division.passed(number, own),
            )


@functools.lru_cache(maxsize=8)
def _batches(plan: Plan, epoch: int) -> EpochBatches:
    assert plan.buckets is not None
    return plan.buckets.batches(plan.order(epoch), plan.tail)
