from __future__ import annotations

from pathlib import Path

import pytest
from written import write_raw, write_tars

import bucketfeed as bf


@pytest.fixture
def raw(tmp_path: Path) -> bf.MapDataset:
    return bf.open_dataset(write_raw(tmp_path / "raw"), cache=bf.DiskCache(tmp_path / "cache", "100MB"))


@pytest.fixture
def tars(tmp_path: Path) -> bf.MapDataset:
    return bf.open_dataset(write_tars(tmp_path / "tars"), cache=bf.DiskCache(tmp_path / "cache", "100MB"))


@pytest.fixture(params=["raw", "tars"])
def dataset(request: pytest.FixtureRequest) -> bf.MapDataset:
    return request.getfixturevalue(request.param)
