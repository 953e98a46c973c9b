from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bucketfeed.cache.disk import DiskCache

sys.path.insert(0, str(Path(__file__).parents[1] / "store"))  # the contract of all readers


@pytest.fixture
def cache(tmp_path: Path) -> DiskCache:
    return DiskCache(tmp_path / "cache", "64MiB")
