"""Folders to train in."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from training import Training

HERE = Path(__file__).parent


@pytest.fixture
def training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Training]:
    """Give `training(name)`: a folder of its own for each name."""
    monkeypatch.chdir(HERE)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    torch.set_num_threads(1)  # the same sums in the same order
    return lambda name: Training(tmp_path / name, monkeypatch)
