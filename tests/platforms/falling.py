"""A user's model for tests on Ray: its node dies under it, later its launcher is told to stop, then it trains on."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import torch
from torch import nn

# How many batches a worker trains on before: in the second epoch of 12 steps, 3 steps behind a checkpoint.
BATCHES = 18


class Net(nn.Module):
    """A linear layer that counts its batches."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.layer = nn.Linear(3 * 8 * 8, num_classes)
        self.batches = 0

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.batches += 1
            if self.batches == BATCHES:
                trouble(Path(os.environ["FALLING"]))
        return self.layer(images.flatten(1).float())


def net(num_classes: int) -> Net:
    return Net(num_classes)


def trouble(folder: Path) -> None:
    """Tell the launcher that `launcher` names to stop; or, before, kill this node if it is the one in `doomed`."""
    launcher = folder / "launcher"
    if launcher.exists():
        os.kill(int(launcher.read_text()), signal.SIGTERM)
        launcher.unlink()
    elif not (folder / "fallen").exists():
        import ray

        if (folder / "doomed").read_text() == ray.get_runtime_context().get_node_id():
            (folder / "fallen").touch()
            os.kill(os.getppid(), signal.SIGKILL)  # the node's raylet
            os.kill(os.getpid(), signal.SIGKILL)
