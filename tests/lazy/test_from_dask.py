"""Dask arrays and data frames: rows by number, each partition computed once, the loader's order and resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dask.array as da
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest

import bucketfeed as bf

VALUES = np.arange(120, dtype=np.float32).reshape(40, 3)


def noted(block: np.ndarray, folder: str) -> np.ndarray:
    with open(Path(folder) / "computed", "a") as file:
        file.write(f"{block.shape[0]}\n")
    return block + 1


def lazily(folder: Path) -> da.Array:
    blocks = da.from_array(VALUES, chunks=(10, 2)).rechunk((10, 3))
    return blocks.map_blocks(noted, str(folder), dtype=VALUES.dtype, meta=np.empty((0, 3), VALUES.dtype))


def test_a_partition_is_computed_once_and_only_when_a_row_of_it_is_asked_for(tmp_path: Path) -> None:
    cache = bf.DiskCache(tmp_path / "cache", "1GB")
    ds = bf.from_dask(lazily(tmp_path), cache=cache)
    assert len(ds) == 40
    assert not (tmp_path / "computed").exists()
    assert ds[25]["data"].tolist() == (VALUES[25] + 1).tolist()
    assert (tmp_path / "computed").read_text() == "10\n"
    again = bf.from_dask(lazily(tmp_path), cache=cache)
    assert [s["data"].tolist() for s in again] == (VALUES + 1).tolist()
    assert (tmp_path / "computed").read_text() == "10\n" * 4


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_loader_gives_each_row_once_and_resumes(tmp_path: Path, num_workers: int) -> None:
    ds = bf.from_dask(lazily(tmp_path), cache=bf.DiskCache(tmp_path / "cache", "1GB"))

    def load(state: Any = None) -> tuple[list[Any], Any]:
        with bf.Loader(ds, 4, shuffle=True, seed=1, num_workers=num_workers) as loader:
            if state:
                loader.load_state_dict(state)
            got, middle = [], None
            for batch in loader:
                got += batch["data"].tolist()
                if len(got) == 12:
                    middle = loader.state_dict()
            return got, middle

    whole, middle = load()
    assert sorted(whole) == (VALUES + 1).tolist()
    assert load(middle)[0] == whole[12:]
    assert (tmp_path / "computed").read_text() == "10\n" * 4


def test_a_data_frame_gives_rows_as_fields(tmp_path: Path) -> None:
    frame = pd.DataFrame({"n": range(20), "text": [f"é{i}" * i for i in range(20)]})
    ds = bf.from_dask(dd.from_pandas(frame, npartitions=3), cache=bf.DiskCache(tmp_path / "cache", "1GB"))
    assert [(s["n"], s["text"]) for s in ds] == list(frame.itertuples(index=False, name=None))


def test_unknown_chunks_are_counted(tmp_path: Path) -> None:
    x = da.from_array(np.arange(20), chunks=5)
    ds = bf.from_dask(x[x % 2 == 0], cache=bf.DiskCache(tmp_path / "cache", "1GB"))
    assert [int(s["data"]) for s in ds] == list(range(0, 20, 2))


def test_what_has_no_rows_and_what_fails_is_named(tmp_path: Path) -> None:
    with pytest.raises(bf.errors.ConfigError, match="list"):
        bf.from_dask([1])
    with pytest.raises(bf.errors.ConfigError, match="object"):
        bf.from_dask(da.from_array(np.array([None, 1], object), chunks=1))
    failing = da.from_array(VALUES, chunks=(10, 3)).map_blocks(lambda b: 1 / 0, dtype=VALUES.dtype, meta=VALUES[:0])
    ds = bf.from_dask(failing, cache=bf.DiskCache(tmp_path / "cache", "1GB"))
    with pytest.raises(bf.errors.DecodeError, match=r"partition 2 .*ZeroDivisionError"):
        ds[20]
