"""From the bytes of a batch to the batch: parse, decode, collate, pin."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bucketfeed.data.collate import as_tensors, default_collate
from bucketfeed.data.dataset import MapDataset
from bucketfeed.data.pipeline import BatchBytes
from bucketfeed.data.plan import BatchPlan
from bucketfeed.data.random import sample_rngs
from bucketfeed.data.skip import Failure

Collate = Callable[[Sequence[Any]], Any]


@dataclass(frozen=True, slots=True)
class Assembled:
    """A batch, how many samples are in it, and which were left out."""

    batch: Any
    samples: int
    failures: tuple[Failure, ...] = ()


@dataclass(frozen=True, slots=True)
class Assembler:
    """Builds one batch in the calling thread."""

    dataset: MapDataset
    collate: Collate
    seed: int
    pin_memory: bool = False

    def __call__(self, plan: BatchPlan, bodies: BatchBytes) -> Assembled:
        """Return the batch of `plan`, whose samples have these bytes."""
        plain = self.collate is default_collate
        batches = self.dataset.index.batches
        if isinstance(batches, str) or (batches and plain and self.dataset.decode is None):
            whole = self.dataset.build_batch(plan.samples, bodies)
            whole = as_tensors(whole) if batches in (True, "torch") else whole
            whole = whole if plain else self.collate(whole)
            return Assembled(pinned(whole) if self.pin_memory else whole, len(plan.samples))
        buffers = bodies.each()
        with sample_rngs(self.seed, plan.epoch) as begin:
            samples, failures = self.dataset.build(plan.samples.tolist(), buffers, begin)
        self.dataset.reader.counter.add(bytes_read=sum(map(len, buffers)))
        batch = self.collate(samples)
        return Assembled(pinned(batch) if self.pin_memory else batch, len(samples), tuple(failures))


def pinned(batch: Any) -> Any:
    """Return `batch` with its tensors in page-locked memory, ready for asynchronous copies to the GPU."""
    if isinstance(batch, torch.Tensor):
        return batch.pin_memory()
    if isinstance(batch, dict):
        return {name: pinned(value) for name, value in batch.items()}
    if isinstance(batch, tuple):
        values = [pinned(value) for value in batch]
        return type(batch)(*values) if hasattr(batch, "_fields") else tuple(values)
    return batch
