from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest
from many import SAMPLES, payload

import bucketfeed as bf


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same samples as raw objects, as tars and as JSON lines."""
    top = tmp_path_factory.mktemp("views")
    (top / "tars").mkdir()
    (top / "lines").mkdir()
    for number in range(SAMPLES):
        path = top / "raw" / f"class{number % 3}" / f"{number:05}.bin"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(payload(number))
    for first in range(0, SAMPLES, 20):
        with tarfile.open(top / "tars" / f"{first:05}.tar", "w") as tar:
            for number in range(first, min(first + 20, SAMPLES)):
                member = tarfile.TarInfo(f"{number:05}.bin")
                member.size = len(payload(number))
                tar.addfile(member, io.BytesIO(payload(number)))
    lines = "".join(f'{{"number": {number}}}\n' for number in range(SAMPLES))
    (top / "lines" / "all.jsonl").write_text(lines)
    return top


@pytest.fixture
def raw(folder: Path) -> bf.MapDataset:
    return bf.open_dataset(folder / "raw", cache=None)


@pytest.fixture
def tars(folder: Path, tmp_path: Path) -> bf.MapDataset:
    return bf.open_dataset(folder / "tars", cache=bf.DiskCache(tmp_path / "cache", "100MB"))


@pytest.fixture
def lines(folder: Path) -> bf.MapDataset:
    return bf.open_dataset(folder / "lines", cache=None)


@pytest.fixture(params=["raw", "tars", "lines"])
def dataset(request: pytest.FixtureRequest) -> bf.MapDataset:
    return request.getfixturevalue(request.param)
