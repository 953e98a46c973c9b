"""Rows of `.npy` files: every dtype and order by its rule, or refused by name."""

from __future__ import annotations

import io
import pickle
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import bucketfeed as bf
from bucketfeed.errors import ConfigError, FormatError

MATRIX = [[1.5, -2.0, 3.25], [4.0, 5.5, 6.0]]


def batch_of(ds: bf.MapDataset, size: int | None = None, **options) -> dict:
    return next(iter(bf.Loader(ds, batch_size=size or len(ds), **options)))


@pytest.mark.parametrize("dtype", [">f4", ">f8", ">i8", ">u2"])
def test_big_endian_rows_are_native_tensors_of_the_same_values_c082(saved, dtype: str):
    values = np.abs(np.array(MATRIX)).astype(dtype)
    ds = bf.open_dataset(saved(values))
    batch = batch_of(ds)["array"]
    assert batch.dtype == torch.from_numpy(values.astype(dtype.replace(">", "="))).dtype
    assert batch.tolist() == values.tolist()
    assert ds[1]["array"].dtype.isnative
    assert bf.default_collate([ds[0], ds[1]])["array"].tolist() == values.tolist()


def test_a_single_value_has_no_rows_and_is_refused_by_name_c086(saved):
    with pytest.raises(FormatError, match=r"x\.npy.*shape \(\)"):
        bf.open_dataset(saved(np.array(3.5)))


def test_an_empty_array_has_no_samples_c086(saved):
    ds = bf.open_dataset(saved(np.empty((0, 3))))
    assert len(ds) == 0
    assert list(ds) == []


def test_the_fields_of_a_structure_are_the_samples_own_c086(saved):
    rows = np.array([(1, 2.5, b"ab"), (2, 3.5, b"c")], [("id", ">i4"), ("v", "<f8"), ("s", "S3")])
    ds = bf.open_dataset(saved(rows))
    assert ds[0] == {"__key__": "x.npy[0]", "id": 1, "v": 2.5, "s": b"ab"}
    batch = batch_of(ds)
    assert batch["id"].tolist() == [1, 2]
    assert batch["s"] == [b"ab", b"c"]


def test_pickled_objects_are_refused_and_never_loaded_c086(saved, tmp_path: Path):
    touched = tmp_path / "touched"

    class Bomb:
        def __reduce__(self):
            return Path.touch, (touched,)

    with pytest.raises(FormatError, match=r"x\.npy holds pickled objects"):
        bf.open_dataset(saved(np.array([Bomb()], object), allow_pickle=True))
    assert not touched.exists()


def test_text_is_str_and_bytes_c086(saved):
    ds = bf.open_dataset(saved(np.array(["ab", "cde"])))
    assert [type(ds[0]["array"]), ds[0]["array"], ds[1]["array"]] == [str, "ab", "cde"]
    assert batch_of(ds)["array"] == ["ab", "cde"]


def test_dates_are_whole_numbers_in_their_unit_c086(saved):
    days = np.array(["1970-01-03", "2024-01-01"], "datetime64[D]")
    batch = batch_of(bf.open_dataset(saved(days)))["array"]
    assert batch.tolist() == [2, 19723]
    assert batch.dtype == torch.int64


@pytest.mark.parametrize(
    ("values", "dtype"),
    [(np.array([1.5, -0.25], np.float16), torch.float16), (np.array([True, False]), torch.bool)],
    ids=["float16", "bool"],
)
def test_half_floats_and_truth_values_stay_what_they_are_c086(saved, values: np.ndarray, dtype: torch.dtype):
    batch = batch_of(bf.open_dataset(saved(values)))["array"]
    assert batch.dtype == dtype
    assert batch.tolist() == values.tolist()


def test_a_cut_file_is_refused_by_name_with_the_row_it_ends_at_c086(saved):
    path = saved(np.zeros((100, 10)))
    path.write_bytes(path.read_bytes()[:4128])
    with pytest.raises(FormatError, match=r"x\.npy is cut short.*\(100, 10\).*row 49"):
        bf.open_dataset(path)


@pytest.mark.parametrize(
    "body", [b"", b"\x93NUM", b"hello, this is text" * 10, b"\x93NUMPY\x01\x00\x10\x00{'descr': oops   "]
)
def test_what_is_no_npy_is_refused_by_name(saved, body: bytes):
    path = saved(np.zeros(3))
    path.write_bytes(body)
    with pytest.raises(FormatError, match=r"x\.npy"):
        bf.open_dataset(path)


def test_a_long_header_and_one_of_version_3_are_read(saved):
    dtype = [(f"field {n:03} of many" + "名" * (n == 7), "<i4") for n in range(99)]
    with pytest.warns(UserWarning, match="3.0"):
        path = saved(np.arange(198, dtype="i4").view(dtype))
    assert bf.open_dataset(path)[1]["field 001 of many"] == 100


def test_files_of_one_prefix_are_shards_of_one_array_and_headers_are_all_that_is_read_to_open_it(tmp_path: Path):
    for shard in range(3):
        np.save(tmp_path / f"{shard}.npy", np.full((4, 2), shard))
    ds = bf.open_dataset(tmp_path)
    assert ds.index.format == "arrays"
    assert [ds[i]["array"].tolist() for i in (0, 4, 11)] == [[0, 0], [1, 1], [2, 2]]
    assert ds[11]["__key__"] == "2.npy[3]"
    assert len(ds) == 12


def test_shards_whose_rows_differ_are_refused_by_name(tmp_path: Path):
    np.save(tmp_path / "0.npy", np.zeros((4, 2)))
    np.save(tmp_path / "1.npy", np.zeros((4, 3)))
    with pytest.raises(FormatError, match=r"0\.npy has array \(4, 2\).*1\.npy has array \(4, 3\).*format='raw'"):
        bf.open_dataset(tmp_path)


def test_arrays_beside_pictures_are_files_like_any_other(tmp_path: Path):
    (tmp_path / "0.jpg").write_bytes(b"x")
    np.save(tmp_path / "0.npy", np.zeros(3))
    assert bf.open_dataset(tmp_path).index.format == "raw"


def test_a_row_is_an_array_of_its_own(saved):
    ds = bf.open_dataset(saved(np.zeros((2, 3))))
    row = ds[0]["array"]
    row += 1
    assert ds[0]["array"].tolist() == [0, 0, 0]


def test_a_window_that_is_none_is_refused(saved):
    with pytest.raises(ConfigError, match="window"):
        bf.open_arrays(saved(np.zeros(3)), window=0)


DTYPES = st.sampled_from(["<f4", ">f4", "<i8", ">u2", "|u1", "|b1", "<c8", ">f8"])


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(0, 40),
    rest=st.lists(st.integers(1, 4), max_size=3),
    dtype=DTYPES,
    order=st.sampled_from("CF"),
    window=st.none() | st.integers(1, 12),
    stride=st.none() | st.integers(1, 7),
    chunk_bytes=st.integers(1, 400),
    data=st.data(),
)
def test_rows_and_windows_are_those_that_numpy_gives(rows, rest, dtype, order, window, stride, chunk_bytes, data):
    numbers = np.random.default_rng(rows).integers(0, 2, (rows, *rest))
    array = np.array(numbers * 7, dtype, order=order)
    starts = range(0, rows - (window or 1) + 1, stride or window or 1)
    expected = [array[at : at + window] if window else array[at] for at in starts]
    with tempfile.TemporaryDirectory() as folder:
        np.save(Path(folder) / "x.npy", array)
        ds = bf.open_arrays(Path(folder) / "x.npy", window=window, stride=stride, progress=False)
        assert len(ds) == len(expected)
        if not expected:
            return
        i = data.draw(st.integers(0, len(ds) - 1))
        np.testing.assert_array_equal(ds[i]["array"], expected[i])
        chunks = ds.chunks(chunk_bytes)
        assert int(np.sum(chunks.counts)) == len(ds)
        assert int(np.min(chunks.counts)) >= 1
        chunk = chunks.range(int(chunks.of(np.array([i]))[0]))
        assert chunk.start <= ds.index.range(i).start
        assert ds.index.range(i).stop <= chunk.stop
        loader = bf.Loader(ds, batch_size=5, shuffle=True, seed=3, tail="uneven", chunk_bytes=chunk_bytes)
        seen = {}
        for batch in loader:
            for key, value in zip(batch["__key__"], batch["array"], strict=True):
                seen[int(key[6:-1])] = value.numpy()
        assert sorted(seen) == list(starts)
        for at, one in zip(starts, expected, strict=True):
            np.testing.assert_array_equal(seen[at], one)
        loader.close()


def test_a_fast_batch_is_what_collating_single_samples_gives(saved):
    ds = bf.open_dataset(saved(np.arange(60.0).reshape(20, 3)))
    fast, slow = batch_of(ds, 7, shuffle=True), batch_of(ds, 7, shuffle=True, collate=lambda s: bf.default_collate(s))
    assert fast["__key__"] == slow["__key__"]
    assert torch.equal(fast["array"], slow["array"])


def test_a_loop_over_rows_goes_on_where_it_was(saved):
    ds = bf.open_arrays(saved(np.arange(100)), window=8, stride=1)
    loader = bf.Loader(ds, batch_size=4, shuffle=True, seed=5, chunk_bytes=64)
    whole = [b["array"].tolist() for b in loader]
    loader = bf.Loader(ds, batch_size=4, shuffle=True, seed=5, chunk_bytes=64)
    it = iter(loader)
    first = [next(it)["array"].tolist() for _ in range(9)]
    again = bf.Loader(pickle.loads(pickle.dumps(ds)), batch_size=4, shuffle=True, seed=5, chunk_bytes=64)
    again.load_state_dict(loader.state_dict())
    assert first + [b["array"].tolist() for b in again] == whole


@pytest.mark.parametrize("order", ["C", "F"])
def test_an_epoch_from_a_bucket_fetches_each_byte_once(moto_bucket, cache: bf.DiskCache, order: str):
    array = np.array(np.random.default_rng(0).random((3000, 50)), order=order)
    body = io.BytesIO()
    np.save(body, array)
    moto_bucket.put("x.npy", body.getvalue())
    ds = bf.open_dataset(moto_bucket.url + "x.npy", storage_options=moto_bucket.storage_options, cache=cache)
    loader = bf.Loader(ds, batch_size=100, shuffle=True, chunk_bytes="100kB")
    for _ in range(2):
        for batch in loader:
            rows = [int(key[6:-1]) for key in batch["__key__"]]
            np.testing.assert_array_equal(batch["array"].numpy(), array[rows])
    first = 100 * 400  # the first batch is read by its rows, not by chunks
    assert ds.stats().bytes_fetched <= len(body.getvalue()) + first + 2048
