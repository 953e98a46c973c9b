"""What the ranks of a run do together: meet, add up, agree to stop."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from datetime import timedelta
from types import FrameType

import torch
import torch.distributed as dist

from bucketfeed.sampling.topology import Topology

_TIMEOUT = timedelta(minutes=10)


@contextlib.contextmanager
def process_group(topology: Topology, device: torch.device) -> Iterator[None]:
    """Join the process group where there are several ranks: nccl for GPUs, else gloo."""
    if topology.world_size == 1 or dist.is_initialized():
        yield
        return
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=_TIMEOUT)
    try:
        yield
    finally:
        dist.destroy_process_group()


def summed(values: list[float], device: torch.device) -> list[float]:
    """Return each value added up over all ranks."""
    return _reduced(values, device, dist.ReduceOp.SUM)


def largest(values: list[float], device: torch.device) -> list[float]:
    """Return the greatest of each value over all ranks."""
    return _reduced(values, device, dist.ReduceOp.MAX)


def _reduced(values: list[float], device: torch.device, how: dist.ReduceOp.RedOpType) -> list[float]:
    if not dist.is_initialized():
        return values
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, how)
    return tensor.tolist()


class StopSignal:
    """Notes SIGTERM (and a first Ctrl-C) instead of dying of it, while its `with` block runs in the main thread."""

    def __init__(self) -> None:
        self.received: str | None = None
        self._before: dict[int, object] = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.received is not None:
            raise KeyboardInterrupt
        self.received = signal.Signals(number).name

    def __enter__(self) -> StopSignal:
        for number in (signal.SIGTERM, signal.SIGINT):
            with contextlib.suppress(ValueError):  # not in the main thread: then its owner sees to signals
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
