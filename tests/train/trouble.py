"""A model that sends its own process a signal at a told moment: the user's own model of the tests."""

from __future__ import annotations

import json
import os
import signal

import torch
from torch import nn


class Troubled(nn.Module):
    """Small, with running means and drawn numbers, so that a resume that loses either is found out."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.BatchNorm2d(3), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Dropout(0.2), nn.Linear(48, num_classes)
        )
        self.seen = {"training": 0, "evaluation": 0}
        self.trouble = json.loads(os.environ.get("TROUBLE", "{}"))

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        when = "training" if self.training else "evaluation"
        self.seen[when] += 1
        at = self.trouble.get(when)
        if at == self.seen[when] and os.environ.get("RANK", "0") == str(self.trouble.get("rank", 0)):
            os.kill(os.getpid(), getattr(signal, self.trouble["signal"]))
        return self.net(pictures)


def net(num_classes: int) -> nn.Module:
    return Troubled(num_classes)


def another_net(num_classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(192, num_classes))


class OwnStep(nn.Module):
    """A model that reckons its own loss."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return (self.weight - batch["length"].float().mean()).square()


def lengths(sample: dict[str, bytes]) -> dict[str, int]:
    return {"length": len(sample["png"])}


def nothing() -> str:
    return "no module"
