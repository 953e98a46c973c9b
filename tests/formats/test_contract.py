"""What holds for every format: one number, one sample, however and wherever it is read."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import multiprocessing
import pickle
import tarfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import dask.array
import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zarr
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import bucketfeed as bf

N = 60
ROWS = [{"id": i, "text": "ü" * (i % 7) + str(i)} for i in range(N)]
ARRAY = np.arange(N * 6, dtype=np.float32).reshape(N, 3, 2)


def lines(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def in_two(folder: Path, suffix: str, write: Callable[[list[dict[str, Any]]], bytes]) -> Path:
    for name, rows in (("a", ROWS[:25]), ("b", ROWS[25:])):
        (folder / f"{name}{suffix}").write_bytes(write(rows))
    return folder


def tar(rows: list[dict[str, Any]]) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as made:
        for row in rows:
            for field, body in (("id", str(row["id"])), ("txt", row["text"])):
                member = tarfile.TarInfo(f"{row['id']:03}.{field}")
                member.size = len(body.encode())
                made.addfile(member, io.BytesIO(body.encode()))
    return file.getvalue()


def csv(rows: list[dict[str, Any]]) -> bytes:
    return ("id,text\n" + "".join(f'{row["id"]},"{row["text"]}\n,"\n' for row in rows)).encode()


def table(rows: list[dict[str, Any]]) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), file, row_group_size=11)
    return file.getvalue()


def raw(folder: Path) -> bf.MapDataset:
    for row in ROWS:
        (folder / f"{row['id']:03}.txt").write_text(row["text"])
    return bf.open_dataset(folder)


def hdf5(folder: Path) -> bf.MapDataset:
    with h5py.File(folder / "a.h5", "w") as file:
        file.create_dataset("x", data=ARRAY, chunks=(7, 3, 2), compression="gzip")
    return bf.open_dataset(folder / "a.h5")


def zarr_array(folder: Path) -> bf.MapDataset:
    made = zarr.open_array(folder / "a.zarr", mode="w", shape=ARRAY.shape, chunks=(7, 3, 2), dtype=ARRAY.dtype)
    made[:] = ARRAY
    return bf.open_dataset(folder / "a.zarr")


def npy(folder: Path) -> bf.MapDataset:
    np.save(folder / "a.npy", ARRAY)
    return bf.open_dataset(folder / "a.npy")


def npz(folder: Path) -> bf.MapDataset:
    np.savez_compressed(folder / "a.npz", x=ARRAY, y=np.arange(N))
    return bf.open_dataset(folder / "a.npz")


def tokens(folder: Path) -> bf.MapDataset:
    np.arange(N * 4 + 1, dtype=np.uint16).tofile(folder / "a.bin")
    return bf.TokenDataset(folder / "a.bin", window=4)


def text(folder: Path) -> bf.MapDataset:
    return bf.open_dataset(in_two(folder, ".txt", lambda rows: lines(rows).replace(b"\n", b"\r\n")), format="text")


FORMATS: dict[str, Callable[[Path], bf.MapDataset]] = {
    "raw": raw,
    "tar": lambda folder: bf.open_dataset(in_two(folder, ".tar", tar)),
    "jsonl": lambda folder: bf.open_dataset(in_two(folder, ".jsonl", lines)),
    "jsonl.gz": lambda folder: bf.open_dataset(in_two(folder, ".jsonl.gz", lambda r: gzip.compress(lines(r)))),
    "jsonl.bz2": lambda folder: bf.open_dataset(in_two(folder, ".jsonl.bz2", lambda r: bz2.compress(lines(r)))),
    "jsonl.zst": lambda folder: bf.open_dataset(
        in_two(folder, ".jsonl.zst", lambda r: zstandard.compress(lines(r[:9])) + zstandard.compress(lines(r[9:])))
    ),
    "text": text,
    "csv": lambda folder: bf.open_dataset(in_two(folder, ".csv", csv)),
    "parquet": lambda folder: bf.open_dataset(in_two(folder, ".parquet", table)),
    "npy": npy,
    "npz": npz,
    "hdf5": hdf5,
    "zarr": zarr_array,
    "tokens": tokens,
    "dask": lambda folder: bf.from_dask(
        dask.array.from_array(ARRAY, chunks=(13, 3, 2)), cache=bf.DiskCache(folder / "cache")
    ),
    "concat": lambda folder: bf.concat([npy(folder).map(without_key), hdf5(folder).map(without_key)]).take(N),
    "view": lambda folder: bf.open_dataset(in_two(folder, ".jsonl", lines)).repeat(2).select(slice(N, None)),
}


def without_key(sample: dict[str, Any]) -> Any:
    return next(value for name, value in sample.items() if name != "__key__")


def plain(value: Any) -> Any:
    """Return a sample as something that can be compared."""
    if isinstance(value, dict):
        return {name: plain(part) for name, part in value.items()}
    return value.tolist() if hasattr(value, "tolist") else value


def all_of(dataset: bf.MapDataset) -> list[Any]:
    return [plain(dataset[i]) for i in range(len(dataset))]


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, bf.MapDataset]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("caches")))
        yield {name: make(tmp_path_factory.mktemp("data")) for name, make in FORMATS.items()}


@pytest.mark.parametrize("name", FORMATS)
class TestEveryFormat:
    def test_has_each_sample_once_under_its_number(self, opened: dict[str, bf.MapDataset], name: str):
        dataset = opened[name]
        one_by_one = all_of(dataset)
        assert len(dataset) == len(one_by_one) == N
        assert len({repr(sample) for sample in one_by_one}) == N
        assert [plain(sample) for sample in dataset] == one_by_one
        numbers = np.random.default_rng(3).permutation(N)
        assert [plain(s) for s in dataset.__getitems__(numbers.tolist())] == [one_by_one[i] for i in numbers]
        with pytest.raises(IndexError):
            dataset[N]

    def test_is_the_same_after_pickling(self, opened: dict[str, bf.MapDataset], name: str):
        assert all_of(pickle.loads(pickle.dumps(opened[name]))) == all_of(opened[name])

    @settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
    @given(data=st.data())
    def test_comes_once_an_epoch_over_any_ranks_batches_and_chunks(
        self, opened: dict[str, bf.MapDataset], name: str, data: st.DataObject
    ):
        world = data.draw(st.integers(1, 5))
        chunk_bytes = data.draw(st.sampled_from([1, 100, 1000, 1 << 20]))
        batch_size = data.draw(st.integers(1, 9))
        streams = data.draw(st.integers(1, 20))
        taken = []
        for rank in range(world):
            loader = bf.Loader(
                opened[name],
                batch_size,
                shuffle=data.draw(st.booleans()) if world == 1 else True,
                tail="uneven",
                topology=bf.Topology(rank, world),
                collate=list,
                chunk_bytes=chunk_bytes,
                streams=streams,
            )
            taken += [repr(plain(sample)) for batch in loader for sample in batch]
        assert sorted(taken) == sorted(repr(sample) for sample in all_of(opened[name]))


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_every_format_is_the_same_in_a_process_of_any_kind(opened: dict[str, bf.MapDataset], method: str):
    here = {name: all_of(dataset) for name, dataset in opened.items()}
    with ProcessPoolExecutor(1, multiprocessing.get_context(method)) as pool:
        for name, dataset in opened.items():
            assert pool.submit(all_of, dataset).result() == here[name], name
