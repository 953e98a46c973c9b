from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest
from sources import LINES, RAW, TARS, payload

import bucketfeed as bf


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three data sets of different samples: raw objects, tars and lines."""
    top = tmp_path_factory.mktemp("mixing")
    (top / "tars").mkdir()
    (top / "lines").mkdir()
    for number in RAW:
        path = top / "raw" / f"{number:05}.bin"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(payload(number))
    for first in range(TARS.start, TARS.stop, 20):
        with tarfile.open(top / "tars" / f"{first:05}.tar", "w") as tar:
            for number in range(first, min(first + 20, TARS.stop)):
                member = tarfile.TarInfo(f"{number:05}.bin")
                member.size = len(payload(number))
                tar.addfile(member, io.BytesIO(payload(number)))
    for part in range(2):
        numbers = LINES[part::2]
        (top / "lines" / f"{part}.jsonl").write_text("".join(f'{{"number": {number}}}\n' for number in numbers))
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
