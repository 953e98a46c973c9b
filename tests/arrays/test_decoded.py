"""Arrays that must be decoded or put together: `.npz`, HDF5, Zarr, and several zipped by row."""

from __future__ import annotations

import pickle
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
import zarr
from torch.utils.data import DataLoader

import bucketfeed as bf
from bucketfeed.errors import ConfigError, FormatError

ROWS = 300
X = np.random.default_rng(0).random((ROWS, 3, 4)).astype(">f4")
Y = np.arange(ROWS)


def write_npy(folder: Path) -> Path:
    np.save(folder / "x.npy", X)
    np.save(folder / "y.npy", Y)
    return folder


def write_fortran(folder: Path) -> Path:
    np.save(folder / "x.npy", np.asfortranarray(X))
    np.save(folder / "y.npy", Y)
    return folder


def write_npz(folder: Path) -> Path:
    np.savez(folder / "a.npz", x=X, y=Y)
    return folder / "a.npz"


def write_deflated(folder: Path) -> Path:
    np.savez_compressed(folder / "a.npz", x=X, y=Y)
    return folder / "a.npz"


def write_deflated_fortran(folder: Path) -> Path:
    np.savez_compressed(folder / "a.npz", x=np.asfortranarray(X), y=Y)
    return folder / "a.npz"


def write_hdf5(folder: Path) -> Path:
    with h5py.File(folder / "a.h5", "w") as file:
        file["x"], file["y"] = X, Y
    return folder / "a.h5"


def write_filtered(folder: Path) -> Path:
    with h5py.File(folder / "a.h5", "w") as file:
        file.create_dataset("x", data=X, chunks=(64, 3, 2), compression="gzip", shuffle=True)
        file["y"] = Y
    return folder / "a.h5"


def write_zarr(folder: Path, version: int, **options) -> Path:
    group = zarr.open_group(folder / "a.zarr", mode="w", zarr_format=version)
    group.create_array("x", shape=X.shape, chunks=(50, 3, 4), dtype="f4", **options)[:] = X
    group.create_array("y", shape=Y.shape, chunks=(77,), dtype="i8")[:] = Y
    return folder / "a.zarr"


WRITERS: dict[str, Callable[[Path], Path]] = {
    "npy": write_npy,
    "fortran": write_fortran,
    "npz": write_npz,
    "deflated": write_deflated,
    "deflated-fortran": write_deflated_fortran,
    "hdf5": write_hdf5,
    "filtered": write_filtered,
    "zarr2": lambda folder: write_zarr(folder, 2),
    "zarr3": lambda folder: write_zarr(folder, 3),
    "zarr3-sharded": lambda folder: write_zarr(folder, 3, shards=(100, 3, 4)),
}


@pytest.fixture(params=WRITERS)
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    return WRITERS[request.param](folder)


def opened(url: Path | str, **options) -> bf.MapDataset:
    suffix = ".npy" if Path(url).name == "data" else ""
    return bf.open_arrays(url, data=f"x{suffix}", target=f"y{suffix}", progress=False, **options)


def check(ds: bf.MapDataset, window: int | None = None, **options) -> None:
    seen = []
    with bf.Loader(ds, batch_size=16, shuffle=True, tail="uneven", **options) as loader:
        for batch in loader:
            starts = [int(key[key.rindex("[") + 1 : -1]) for key in batch["__key__"]]
            seen += starts
            of = (lambda a, at: a[at : at + window]) if window else (lambda a, at: a[at])
            np.testing.assert_array_equal(batch["data"].numpy(), [of(X, at) for at in starts])
            np.testing.assert_array_equal(batch["target"].numpy(), [of(Y, at) for at in starts])
    assert sorted(seen) == list(range(len(ds)))


def test_data_and_target_are_zipped_by_row(pair: Path):
    ds = opened(pair)
    assert len(ds) == ROWS
    assert ds[7]["target"] == 7
    assert list(ds[7]) == ["__key__", "data", "target"]
    check(ds)


def test_windows_of_rows_are_those_of_numpy(pair: Path):
    ds = opened(pair, window=128, stride=1)
    assert len(ds) == ROWS - 127
    check(ds, 128)


def test_it_is_the_same_from_a_bucket_with_two_workers_and_then_from_the_cache_alone(
    pair: Path, moto_bucket, cache: bf.DiskCache
):
    root = pair.parent if pair.is_file() else pair
    for path in root.rglob("*"):
        if path.is_file():
            moto_bucket.put(str(path.relative_to(root.parent)), path.read_bytes())
    url = moto_bucket.url + str(pair.relative_to(root.parent))
    name = {"data": url + "/"}.get(pair.name, url)
    suffix = ".npy" if pair.name == "data" else ""
    options = {"storage_options": moto_bucket.storage_options, "cache": cache, "progress": False}
    ds = bf.open_arrays(name, data=f"x{suffix}", target=f"y{suffix}", **options)
    check(ds)
    assert ds.stats().bytes_fetched > 0
    again = pickle.loads(pickle.dumps(ds))
    check(again, num_workers=2)
    check(again)
    assert again.stats().bytes_fetched == 0


@pytest.mark.filterwarnings("ignore:This DataLoader will create 4 worker")
@pytest.mark.parametrize(("start_method", "workers"), [("fork", 4), ("spawn", 2), ("forkserver", 4)])
def test_hdf5_that_the_parent_has_read_is_right_in_workers_of_every_kind_c084(
    tmp_path: Path, start_method: str, workers: int
):
    ds = opened(write_filtered(tmp_path), cache=bf.DiskCache(tmp_path / "cache", "10MB"))
    assert ds[0]["target"] == 0
    pickle.dumps(ds)
    loader = DataLoader(
        ds,
        batch_size=50,
        num_workers=workers,
        collate_fn=bf.default_collate,
        multiprocessing_context=start_method,
        persistent_workers=True,
        timeout=60,
    )
    for _ in range(2):
        batches = list(loader)
        np.testing.assert_array_equal(np.concatenate([b["target"] for b in batches]), Y)
        np.testing.assert_array_equal(np.concatenate([b["data"] for b in batches]), X)


def test_zarr_that_the_parent_has_read_is_right_in_forked_workers(tmp_path: Path):
    ds = opened(write_zarr(tmp_path, 3), cache=bf.DiskCache(tmp_path / "cache", "10MB"))
    assert ds[0]["target"] == 0
    loader = DataLoader(
        ds, batch_size=50, num_workers=2, collate_fn=bf.default_collate, multiprocessing_context="fork", timeout=60
    )
    np.testing.assert_array_equal(np.concatenate([b["data"] for b in loader]), X)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_an_npz_gives_a_sample_for_each_row_of_its_arrays_c086(tmp_path: Path, save):
    save(tmp_path / "two.npz", x=np.arange(6.0).reshape(3, 2), y=np.arange(3))
    ds = bf.open_dataset(tmp_path / "two.npz")
    assert len(ds) == 3
    assert ds[1]["x"].tolist() == [2, 3]
    assert (ds[1]["x"].shape, ds[1]["y"].shape) == ((2,), ())


def test_arrays_of_unequal_length_are_refused_by_name_until_some_are_named(tmp_path: Path):
    np.savez(tmp_path / "a.npz", x=np.zeros((3, 2)), scale=np.zeros(7))
    with pytest.raises(FormatError, match=r"a\.npz has x \(3, 2\).*scale \(7,\)"):
        bf.open_dataset(tmp_path / "a.npz")
    assert len(bf.open_arrays(tmp_path / "a.npz", x="x")) == 3


def test_pickled_members_are_refused(tmp_path: Path):
    np.savez(tmp_path / "a.npz", x=np.array([{}], object))
    with pytest.raises(FormatError, match=r"a\.npz member 'x' holds pickled objects"):
        bf.open_dataset(tmp_path / "a.npz")


def test_a_name_that_is_not_there_is_told_with_those_that_are(tmp_path: Path):
    for url in (write_npz(tmp_path), write_hdf5(tmp_path), write_zarr(tmp_path, 3)):
        with pytest.raises((ConfigError, FormatError), match="'labels'"):
            bf.open_arrays(url, target="labels")


@pytest.mark.parametrize("name", ["a.npz", "a.h5"])
def test_a_file_that_is_damaged_is_refused_by_name(tmp_path: Path, name: str):
    (tmp_path / name).write_bytes(b"nothing of the kind" * 100)
    with pytest.raises(FormatError, match=name.replace(".", r"\.")):
        bf.open_dataset(tmp_path / name)


def test_an_npz_without_arrays_is_refused(tmp_path: Path):
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("readme.txt", "hello")
    with pytest.raises(FormatError, match="no arrays"):
        bf.open_dataset(tmp_path / "a.npz")


def test_text_of_any_length_in_hdf5_is_refused_by_name(tmp_path: Path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["t"] = ["a", "bcd"]
    with pytest.raises(FormatError, match=r"a\.h5 dataset 't'"):
        bf.open_dataset(tmp_path / "a.h5")


def test_neither_h5py_nor_zarr_is_loaded_for_other_arrays(tmp_path: Path):
    write_npy(tmp_path)
    code = (
        "import bucketfeed as bf, sys\n"
        f"bf.open_arrays({str(tmp_path)!r}, data='x.npy', target='y.npy')[0]\n"
        "assert not {'h5py', 'zarr'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_process_that_ends_with_hdf5_open_ends_well(tmp_path: Path):
    path = write_hdf5(tmp_path)
    code = f"import bucketfeed as bf; ds = bf.open_dataset({str(path)!r}); print(len(ds), flush=True)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
