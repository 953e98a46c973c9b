"""A user's own model, which waits, fails or fills the disk when the variable MINE says so."""

from __future__ import annotations

import json
import os
import signal
import time

import torch
from torch import nn

SECONDS = 60.0


class Net(nn.Module):
    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.told = json.loads(os.environ.get("MINE", "{}"))
        width = self.told.get("width", 4)
        self.net = nn.Sequential(
            nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(48, width), nn.Linear(width, num_classes)
        )
        self.steps = 0

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.steps += 1
            self._trouble()
        return self.net(pictures)

    def _trouble(self) -> None:
        if self.steps != self.told.get("at") or os.environ["RANK"] != str(self.told.get("rank", 0)):
            return
        if text := self.told.get("raise"):
            raise ValueError(text)
        print("waiting for the stop", flush=True)
        stop = signal.getsignal(signal.SIGTERM).__self__  # type: ignore[union-attr]
        end = time.monotonic() + SECONDS
        while stop.received is None and time.monotonic() < end:
            os.sched_yield()


def net(num_classes: int) -> nn.Module:
    return Net(num_classes)
