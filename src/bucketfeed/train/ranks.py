"""What the ranks of a run do together: meet, add up, agree, and hear of a stop."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from types import FrameType
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist

from bucketfeed.errors import BucketfeedError, ConfigError
from bucketfeed.sampling.topology import Topology

T = TypeVar("T")

# Bounds the wait for ranks to come together, where one may never start or torchrun be gone, and for each other's
# gradients, where one may wait for data.
_MEETING = timedelta(minutes=10)
# Bounds the wait for a rank that lives but does nothing, such as one that uploads a large checkpoint. A rank that dies
# closes its connections, and the others hear of it at once.
_AGREEING = timedelta(minutes=30)


class Ranks:
    """All ranks of a run, seen from one of them. Every rank must make the same calls in the same order.

    Numbers and values go over gloo and the CPU, so that agreeing on something never waits for a GPU's queue.
    """

    def __init__(self, topology: Topology, group: dist.ProcessGroup | None = None) -> None:
        self.topology = topology
        self._group = group

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which writes what is written once."""
        return self.topology.rank == 0

    def summed(self, values: Iterable[float]) -> list[float]:
        """Return each value added up over all ranks."""
        return self._reduced(values, dist.ReduceOp.SUM)

    def largest(self, values: Iterable[float]) -> list[float]:
        """Return the greatest of each value over all ranks."""
        return self._reduced(values, dist.ReduceOp.MAX)

    def gathered(self, value: T) -> list[T]:
        """Return every rank's value, by rank."""
        if self._group is None:
            return [value]
        values: list[Any] = [None] * self.topology.world_size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def from_first(self, make: Callable[[], T]) -> T:
        """Return to every rank what `make` returns on rank 0, or raise there what it raises of our errors."""
        box: list[Any] = [None, None]
        if self.is_first:
            try:
                box[0] = make()
            except BucketfeedError as e:
                box[1] = e
        if self._group is not None:
            dist.broadcast_object_list(box, src=0, group=self._group)
        value, error = box
        if error is not None:
            raise error
        return value  # type: ignore[no-any-return]

    def check_same(self, what: str, value: str) -> None:
        """Raise `ConfigError` on every rank unless all of them have the same `value`."""
        values = self.gathered(value)
        for rank, other in enumerate(values):
            if other != values[0]:
                raise ConfigError(
                    f"{what} differs between the ranks: rank 0 has {values[0]}, rank {rank} has {other}; give all of "
                    "them the same arguments, and leave the bucket as it is while they start"
                )

    def copy_from_first(self, tensors: Iterable[torch.Tensor]) -> None:
        """Overwrite `tensors` with those of rank 0."""
        if self._group is not None:
            for tensor in tensors:
                dist.broadcast(tensor, src=0)  # over the group of the device that they are on

    def wait_for_all(self) -> None:
        """Return when every rank has come here."""
        self.summed([0.0])

    def _reduced(self, values: Iterable[float], how: dist.ReduceOp.RedOpType) -> list[float]:
        tensor = torch.tensor(list(values), dtype=torch.float64)
        if self._group is not None:
            dist.all_reduce(tensor, how, group=self._group)
        return tensor.tolist()


@contextlib.contextmanager
def joined(topology: Topology, device: torch.device, meeting: timedelta = _MEETING) -> Iterator[Ranks]:
    """Join the other ranks for the `with` block: gradients by nccl on GPUs, else by gloo.

    A process group that is there already (Ray Train makes one) is used, and left in place. Raises `BucketfeedError`
    where the ranks have not all come together after `meeting`.
    """
    if topology.world_size == 1:
        yield Ranks(topology)
        return
    own = not dist.is_initialized()
    if own:
        try:
            dist.init_process_group(
                "nccl" if device.type == "cuda" else "gloo",
                timeout=meeting,
                rank=topology.rank,  # not every launcher sets RANK and WORLD_SIZE
                world_size=topology.world_size,
            )
        except (RuntimeError, ValueError) as e:
            raise BucketfeedError(
                f"rank {topology.rank} of {topology.world_size} did not meet the others: {str(e).splitlines()[0]}; "
                "start all ranks at about the same time: by torchrun, or with MASTER_ADDR (the node of rank 0) and "
                "MASTER_PORT (a free port there) set the same for all of them"
            ) from e
    try:
        yield Ranks(topology, dist.new_group(backend="gloo", timeout=_AGREEING))
    finally:
        if own:
            dist.destroy_process_group()


class StopSignal:
    """Notes SIGTERM (and a first Ctrl-C) instead of dying of it, while its `with` block runs in the main thread.

    Signals come to a process, not to a run: so does what a place asks for that has none, such as Ray, by `ask`.
    """

    _asked: ClassVar[str | None] = None

    def __init__(self) -> None:
        self._received: str | None = None
        self._before: dict[int, object] = {}

    @classmethod
    def ask(cls, by: str | None) -> None:
        """Stop every run of this process at its next step, from any thread, as the signal `by` does; None: no more."""
        cls._asked = by

    @property
    def received(self) -> str | None:
        """The name of what has asked to stop."""
        return self._received or self._asked

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self._received is not None:
            raise KeyboardInterrupt
        self._received = signal.Signals(number).name

    def __enter__(self) -> StopSignal:
        for number in (signal.SIGTERM, signal.SIGINT):
            with contextlib.suppress(ValueError):  # not in the main thread: then its owner sees to signals
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
