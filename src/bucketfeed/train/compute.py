"""Where and how a run computes: device, precision, learning rate, and sums that stay on the device."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable
from typing import Any

import torch

from bucketfeed.errors import ConfigError
from bucketfeed.sampling.topology import Topology
from bucketfeed.train.config import TrainConfig
from bucketfeed.train.model import Outcome
from bucketfeed.train.ranks import Ranks

_log = logging.getLogger(__name__)


def choose_device(config: TrainConfig, topology: Topology) -> torch.device:
    """Return this rank's GPU, or the CPU. Raises `ConfigError` where a GPU was asked for and there is none."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch finds no GPU here; use --device cpu, or install a CUDA build of torch")
    if config.device == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if count > topology.local_world_size and topology.local_rank == 0:
        _log.warning(
            "%d GPUs here, and training in %d process(es), one GPU each: the others stand idle; start %d processes a "
            "node (--nproc-per-node %d), or hide the others by CUDA_VISIBLE_DEVICES",
            *(count, topology.local_world_size, count, count),
        )
    device = torch.device("cuda", topology.local_rank % count)
    torch.cuda.set_device(device)
    return device


def precision(config: TrainConfig, device: torch.device) -> tuple[Any, torch.amp.GradScaler]:
    """Return a maker of autocast contexts, and the gradient scaler, which only fp16 needs.

    "auto" is bf16 where the GPU has it, else fp16; on a CPU all stays fp32.
    """
    kind: str = config.amp
    if kind == "auto":
        kind = "off" if device.type == "cpu" else "bf16" if torch.cuda.is_bf16_supported() else "fp16"
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(kind)

    def autocast() -> contextlib.AbstractContextManager[Any]:
        return torch.autocast(device.type, dtype) if dtype is not None else contextlib.nullcontext()

    return autocast, torch.amp.GradScaler(device.type, enabled=kind == "fp16")


def cosine(steps: int, warmup: int) -> Callable[[int], float]:
    """Return the factor of the learning rate by step: a linear rise, then half a cosine down to zero."""

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        done = min(1.0, (step - warmup) / max(1, steps - warmup))
        return 0.5 * (1 + math.cos(math.pi * done))

    return factor


class Sums:
    """What the outcomes of many batches add up to. Adding never waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self._loss = torch.zeros((), dtype=torch.float64, device=device)
        self._right = torch.zeros((), dtype=torch.float64, device=device)
        self._weight = self._answers = 0

    def add(self, outcome: Outcome) -> None:
        """Add a batch."""
        self._loss += outcome.loss.detach() * outcome.weight
        self._weight += outcome.weight
        if outcome.right is not None:
            self._right += outcome.right
            self._answers += outcome.weight

    def means(self, ranks: Ranks) -> tuple[float | None, float | None]:
        """Return mean loss and accuracy over all ranks; None for what no batch had."""
        sums = [float(self._loss), float(self._right), self._weight, self._answers]
        loss, right, weight, answers = ranks.summed(sums)
        return loss / weight if weight else None, right / answers if answers else None


def moved(batch: Any, device: torch.device) -> Any:
    """Return `batch` with its tensors, in dicts, lists and tuples, on `device`."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {name: moved(value, device) for name, value in batch.items()}
    if isinstance(batch, list):
        return [moved(value, device) for value in batch]
    if isinstance(batch, tuple):
        values = [moved(value, device) for value in batch]
        return type(batch)(*values) if hasattr(batch, "_fields") else tuple(values)
    return batch
