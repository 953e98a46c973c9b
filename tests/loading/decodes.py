"""Decode functions that worker processes import by name: this module imports nothing of the tests."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any


class FailsOnce:
    """Fails for one sample, the first time that any process decodes it."""

    def __init__(self, mark: Path, key: str) -> None:
        self.mark, self.key = mark, key

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        if sample["__key__"].endswith(self.key) and not self.mark.exists():
            self.mark.touch()
            self.fail()
        return sample

    def fail(self) -> None:
        raise ValueError("the first time")


class KillsOnce(FailsOnce):
    """Kills its process instead."""

    def fail(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def with_pid(sample: dict[str, Any]) -> dict[str, Any]:
    return {**sample, "pid": os.getpid()}
