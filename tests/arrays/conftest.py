from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bucketfeed as bf

Opener = Callable[..., bf.MapDataset]


@pytest.fixture
def cache(tmp_path: Path) -> bf.DiskCache:
    return bf.DiskCache(tmp_path / "cache", "100MB")


@pytest.fixture
def saved(tmp_path: Path) -> Callable[[Any], Path]:
    """Write an array as `.npy` and return its path."""

    def save(array: Any, **options: Any) -> Path:
        path = tmp_path / "data" / "x.npy"
        path.parent.mkdir(exist_ok=True)
        np.save(path, array, **options)
        return path

    return save
