"""Parquet as people have it: one huge row group, nested and nullable columns, dictionaries that end, broken files."""

from __future__ import annotations

import math
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tables import batches, opened, put, remote, rows

import bucketfeed as bf
from bucketfeed.errors import FormatError


class TestC074OneHugeRowGroup:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        rng = np.random.default_rng(0)
        table = {"id": np.arange(8000), "blob": [rng.bytes(1024) for _ in range(8000)]}
        return put(tmp_path / "d" / "one.parquet", table, compression=None, use_dictionary=False)

    def test_c074_a_small_column_alone_fetches_little_more_than_itself(self, folder: Path, tmp_path: Path) -> None:
        fsspec.filesystem("memory").pipe("/c074/one.parquet", (folder / "one.parquet").read_bytes())
        cache = bf.DiskCache(tmp_path / "cache", "1GB")
        dataset = bf.open_dataset("memory://c074/", format=bf.Parquet(columns=["id"]), cache=cache, progress=False)
        ids = torch.cat([batch["id"] for batch in batches(dataset, 100, shuffle=True)])
        assert sorted(ids.tolist()) == list(range(8000))
        assert dataset.stats().bytes_fetched < 200_000
        assert dataset.stats().requests == 2  # the footer, the column

    def test_c074_two_workers_give_each_row_once_and_decode_the_group_once(self, folder: Path) -> None:
        dataset = opened(folder, columns=["id", "blob"])
        with bf.Loader(dataset, 50, shuffle=True, num_workers=2) as loader:
            ids = [i for batch in loader for i in batch["id"].tolist()]
            counted = loader.stats()
        assert sorted(ids) == list(range(8000))
        assert counted.bytes_fetched < 1.1 * (folder / "one.parquet").stat().st_size

    def test_c074_it_is_cut_into_chunks_of_bounded_size(self, folder: Path) -> None:
        chunks = opened(folder).chunks()
        assert len(chunks) == 2
        assert max(chunks.size(c) for c in range(2)) <= 5 << 20


def test_c076_nested_columns_are_all_there(tmp_path: Path) -> None:
    schema = pa.schema(
        {
            "id": pa.int64(),
            "ll": pa.list_(pa.list_(pa.int32())),
            "st": pa.struct({"a": pa.int32(), "b": pa.list_(pa.string())}),
            "mp": pa.map_(pa.string(), pa.int64()),
            "fx": pa.list_(pa.float32(), 2),
        }
    )
    expected = [
        {"id": 0, "ll": [[1, 2], [3]], "st": {"a": 1, "b": ["x"]}, "mp": {"k": 1}, "fx": [1.0, 2.0]},
        {"id": 1, "ll": [], "st": {"a": 2, "b": []}, "mp": {}, "fx": [3.0, 4.0]},
        {"id": 2, "ll": [[]], "st": None, "mp": None, "fx": [5.0, 6.0]},
    ]
    stored = [{**row, "mp": None if row["mp"] is None else list(row["mp"].items())} for row in expected]
    dataset = opened(put(tmp_path / "d" / "nested.parquet", pa.Table.from_pylist(stored, schema)))
    assert rows(dataset) == expected
    assert (dataset[0]["fx"].dtype, dataset[0]["fx"].shape) == (np.float32, (2,))
    (batch,) = batches(dataset)
    assert batch["fx"].dtype == torch.float32
    assert batch["fx"].tolist() == [row["fx"] for row in expected]
    assert [batch[name] for name in ("ll", "st", "mp")] == [
        [row[name] for row in expected] for name in ("ll", "st", "mp")
    ]


class TestC077Nulls:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        table = pa.table(
            {
                "n": pa.array([9007199254740993, None, -1, 7], pa.int64()),
                "f": pa.array([1.5, None, math.nan, 0.0], pa.float32()),
                "s": ["a", None, "", "é"],
                "v": pa.array([[1.0, 2.0], [], None, [3.0]], pa.list_(pa.float32())),
            }
        )
        return put(tmp_path / "d" / "nullable.parquet", table)

    def test_c077_values_are_exact_and_null_is_none(self, folder: Path) -> None:
        samples = list(opened(folder))
        assert [sample["n"] for sample in samples] == [9007199254740993, None, -1, 7]
        assert [sample["s"] for sample in samples] == ["a", None, "", "é"]
        assert [sample["v"] for sample in samples] == [[1.0, 2.0], [], None, [3.0]]
        assert samples[1]["f"] is None
        assert math.isnan(samples[2]["f"])

    @pytest.mark.parametrize("batch_format", [None, "torch", "numpy"])
    def test_c077_a_null_in_an_array_is_an_error_that_names_column_and_row(self, folder: Path, batch_format) -> None:
        with pytest.raises(
            FormatError, match=r"column 'n' \(int64\) has null in sample 1, .*nullable.parquet\[1\].*fill="
        ):
            batches(opened(folder, batch_format=batch_format))

    def test_c077_fill_takes_the_place_of_nulls(self, folder: Path) -> None:
        (batch,) = batches(opened(folder, fill={"n": -7, "f": 0.25}))
        assert batch["n"].tolist() == [9007199254740993, -7, -1, 7]
        assert batch["f"].tolist()[1] == 0.25
        assert math.isnan(batch["f"].tolist()[2])
        assert batch["s"] == ["a", None, "", "é"]
        assert [None if v is None else v.tolist() for v in batch["v"]] == [[1.0, 2.0], [], None, [3.0]]

    def test_c077_arrow_keeps_them(self, folder: Path) -> None:
        (batch,) = batches(opened(folder, columns=["n", "v"], batch_format="arrow"))
        assert batch.to_pydict() == {"n": [9007199254740993, None, -1, 7], "v": [[1.0, 2.0], [], None, [3.0]]}


def test_c080_strings_are_right_over_the_end_of_a_dictionary(tmp_path: Path) -> None:
    strings = [f"same{i // 100}" if i < 500 else f"unique-value-{i:06}" for i in range(4000)]
    table = pa.table(
        {"id": pa.array(range(4000), pa.int32()), "s": strings, "c": pa.array(strings).dictionary_encode()}
    )
    folder = put(tmp_path / "d" / "t.parquet", table, dictionary_pagesize_limit=4096, data_page_size=2048)
    stored = pq.ParquetFile(folder / "t.parquet").metadata.row_group(0).column(1)
    assert {"RLE_DICTIONARY", "PLAIN"} <= set(stored.encodings)
    dataset = opened(folder)
    assert [(sample["s"], sample["c"]) for sample in dataset] == list(zip(strings, strings, strict=True))
    for batch_format in ("torch", "numpy", "arrow"):
        for batch in batches(opened(folder, batch_format=batch_format), 300, shuffle=True):
            columns = batch.to_pydict() if batch_format == "arrow" else batch
            expected = [strings[i] for i in (columns["id"] if batch_format == "arrow" else columns["id"].tolist())]
            assert list(columns["s"]) == list(columns["c"]) == expected


def broken_footer(whole: bytes) -> bytes:
    start = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")
    return whole[:start] + b"\xff" * 32 + whole[start + 32 :]


class TestC081EmptyAndBrokenFiles:
    def test_c081_a_file_without_rows_is_passed_over(self, tmp_path: Path) -> None:
        put(tmp_path / "d" / "a.parquet", pa.table({"id": pa.array([], pa.null()), "x": pa.array([], pa.float32())}))
        folder = put(tmp_path / "d" / "b.parquet", {"id": [0, 1], "x": pa.array([1.0, 2.0], pa.float32())})
        dataset = opened(folder)
        assert rows(dataset) == [{"id": 0, "x": 1.0}, {"id": 1, "x": 2.0}]
        assert [batch["id"].tolist() for batch in batches(dataset)] == [[0, 1]]

    def test_c081_it_alone_is_a_data_set_of_no_samples(self, tmp_path: Path) -> None:
        assert len(opened(put(tmp_path / "d" / "a.parquet", {"id": pa.array([], pa.int64())}))) == 0

    @pytest.mark.parametrize(
        ("name", "of", "said"),
        [
            ("c-zero-bytes", lambda whole: b"", "is empty"),
            ("d-cut", lambda whole: whole[:-20], "not with b'PAR1'.*cut short"),
            ("e-csv-inside", lambda whole: b"id,x\n0,1.0\n", "no Parquet file"),
            ("f-csv-inside", lambda whole: b"id,x\n0,1.0\n" * 9, "no Parquet file"),
            ("g-no-footer", lambda whole: whole[:9] + b"\xff\xff\xff\x7fPAR1", "footer has"),
            ("h-other-footer", lambda whole: broken_footer(whole), "footer of .* is damaged"),
        ],
    )
    def test_c081_a_broken_file_is_named(self, tmp_path: Path, name: str, of, said: str) -> None:
        folder = put(tmp_path / "d" / "a.parquet", {"id": [0, 1]})
        (folder / f"{name}.parquet").write_bytes(of((folder / "a.parquet").read_bytes()))
        with pytest.raises(FormatError, match=said) as caught:
            opened(folder)
        assert f"{name}.parquet" in str(caught.value)

    @pytest.mark.parametrize("at", [4, 400])
    def test_c081_a_damaged_page_is_named_when_it_is_read(self, tmp_path: Path, at: int) -> None:
        folder = put(tmp_path / "d" / "a.parquet", {"id": np.arange(5000)}, write_page_checksum=True)
        data = bytearray((folder / "a.parquet").read_bytes())
        data[at : at + 20] = b"\xff" * 20
        (folder / "a.parquet").write_bytes(data)
        with pytest.raises(FormatError, match=r"row groups 0 to 0 of .*a\.parquet can't be decoded"):
            opened(folder)[0]


def test_what_is_damaged_in_a_remote_file_is_told_of_once_it_is_read(tmp_path: Path) -> None:
    folder = put(tmp_path / "d" / "a.parquet", {"id": np.arange(50)})
    dataset, reader = remote(folder, tmp_path / "cache")
    assert [sample["id"] for sample in dataset] == list(range(50))
    assert len(reader.calls) == 2
