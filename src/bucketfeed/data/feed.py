"""Where a loader's batches come from: the threads of this process, or worker processes (`workers`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from bucketfeed.data.assemble import Assembled, Assembler
from bucketfeed.data.pipeline import Pipeline
from bucketfeed.data.plan import BatchPlan, Plan
from bucketfeed.store.ranges import Counts

# Smaller samples are sliced from memory: reading each from a file costs more where threads share the interpreter.
# Workers don't share one, and each would hold as much.
_SMALL_BYTES = 1 << 10


@dataclass(frozen=True, slots=True)
class Taken:
    """A batch as the loop gets it, the global position once it is done, and what a worker counted."""

    made: Assembled
    consumed: int
    counts: Counts = field(default_factory=Counts)


class Feed(Protocol):
    """An endless iterator of batches, from wherever it was last started."""

    def start(self, epoch: int, position: int) -> None:
        """Begin at `position` of `epoch` and go on into the epochs after it."""
        ...

    def __next__(self) -> Taken:
        """Return the next batch, or raise the error met in making it."""
        ...

    def close(self) -> None:
        """End what was started."""
        ...


@dataclass(frozen=True, slots=True)
class Task:
    """All that making batches needs, as values that cross a process."""

    assembler: Assembler
    plan: Plan
    read_ahead_bytes: int
    num_threads: int

    def pipeline(self, plans: Iterator[BatchPlan], assemble: Callable[..., Any], *, small_bytes: int = 0) -> Pipeline:
        """Return a pipeline over `plans`, in this process."""
        dataset = self.assembler.dataset
        return Pipeline(
            self._announced(plans),
            dataset.index,
            self.plan.chunks,
            dataset.reader,
            assemble,
            read_ahead_bytes=self.read_ahead_bytes,
            num_threads=self.num_threads,
            small_bytes=small_bytes,
        )

    def _announced(self, plans: Iterator[BatchPlan]) -> Iterator[BatchPlan]:
        """Tell the cache of each epoch that begins: it then keeps what is still to come, not what was last used."""
        cache, epoch = self.assembler.dataset.cache, None
        for plan in plans:
            if cache is not None and plan.epoch != epoch:
                epoch = plan.epoch
                cache.begin_pass(self.plan.fingerprint, f"{self.plan.seed}/{epoch}")
            yield plan


class ThreadFeed:
    """Batches made by threads of this process."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._pipeline: Pipeline | None = None

    def start(self, epoch: int, position: int) -> None:
        """Begin at `position` of `epoch`."""
        self.close()
        plans = self._task.plan.batches(epoch, position)
        self._pipeline = self._task.pipeline(plans, self._task.assembler, small_bytes=_SMALL_BYTES)

    def __next__(self) -> Taken:
        """Return the next batch."""
        assert self._pipeline is not None
        plan, made = next(self._pipeline)
        return Taken(made, plan.consumed)

    def close(self) -> None:
        """Stop reading ahead."""
        if self._pipeline is not None:
            self._pipeline.close()
            self._pipeline = None
