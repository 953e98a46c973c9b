"""Parquet: the same rows in every way of reading, few bytes fetched, columns, filters, partitions and types."""

from __future__ import annotations

import datetime
import decimal
import multiprocessing
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tables import batches, bytes_of, opened, put, remote, rows, told

import bucketfeed as bf
from bucketfeed.errors import ConfigError, FormatError
from bucketfeed.formats.column_file import ColumnFile


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two files of 60 and 40 rows, in row groups of 25."""
    for first, stop in ((0, 60), (60, 100)):
        ids = np.arange(first, stop)
        table = {"id": ids, "x": (ids / 4).astype("f4"), "text": [f"t{i}" for i in ids], "side": ids % 2 == 0}
        put(tmp_path / "d" / f"{first:03}.parquet", table, row_group_size=25)
    return tmp_path / "d"


def ids(dataset: bf.MapDataset) -> list[int]:
    return [sample["id"] for sample in dataset]


class TestRows:
    def test_are_the_same_in_every_way_of_reading(self, folder: Path) -> None:
        dataset = opened(folder)
        assert len(dataset) == 100
        assert rows(dataset) == [{"id": i, "x": i / 4, "text": f"t{i}", "side": i % 2 == 0} for i in range(100)]
        assert [dataset[i]["__key__"] for i in (0, 59, 60)] == ["000.parquet[0]", "000.parquet[59]", "060.parquet[0]"]

    @pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
    def test_are_the_same_in_processes_of_every_start_method(self, folder: Path, method: str) -> None:
        dataset = opened(folder)
        assert dataset[3]["id"] == 3  # so that the parent has used it
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context(method)) as pool:
            assert pool.submit(ids, dataset).result(60) == list(range(100))

    def test_are_given_in_the_order_of_all_data_sets(self, folder: Path) -> None:
        dataset = opened(folder)
        order = [i for batch in batches(dataset, 7, shuffle=True, seed=3, collate=list) for i in batch]
        assert sorted(row["id"] for row in order) == list(range(100))
        for other in ("arrow", "numpy", "torch", None):
            got = batches(opened(folder, batch_format=other), 7, shuffle=True, seed=3)
            columns = [batch.to_pydict() if other == "arrow" else batch for batch in got]
            assert [int(i) for batch in columns for i in batch["id"]] == [row["id"] for row in order]
            assert [text for batch in columns for text in batch["text"]] == [row["text"] for row in order]

    def test_go_on_where_a_state_was_taken(self, folder: Path) -> None:
        dataset = opened(folder, batch_format="numpy")
        whole = [batch["id"].tolist() for batch in bf.Loader(dataset, 10, shuffle=True)]
        loader = bf.Loader(dataset, 10, shuffle=True)
        iterator = iter(loader)
        before = [next(iterator)["id"].tolist() for _ in range(4)]
        resumed = bf.Loader(opened(folder, batch_format="numpy"), 10, shuffle=True)
        resumed.load_state_dict(loader.state_dict())
        assert before + [batch["id"].tolist() for batch in resumed] == whole

    @pytest.mark.parametrize("chunk_bytes", [1, 40, 1000, "4MiB"])
    def test_are_the_same_for_any_size_of_chunks(self, folder: Path, chunk_bytes: Any) -> None:
        got = batches(opened(folder), 8, shuffle=True, chunk_bytes=chunk_bytes)
        assert sorted(i for batch in got for i in batch["id"].tolist()) == list(range(100))

    def test_of_views_come_in_whole_batches_too(self, folder: Path) -> None:
        first, second = opened(folder, columns=["id"], batch_format="arrow").split(0.3)
        got = [[i for batch in batches(part, 8) for i in batch.column("id").to_pylist()] for part in (first, second)]
        assert [len(part) for part in got] == [30, 70]
        assert sorted(got[0] + got[1]) == list(range(100))

    def test_are_passed_to_decode_and_collate_one_by_one(self, folder: Path) -> None:
        dataset = opened(folder).map(lambda row: row["id"] * 2)
        assert [i for batch in batches(dataset, 10) for i in batch.tolist()] == list(range(0, 200, 2))

    def test_of_a_stock_data_loader_are_samples(self, folder: Path) -> None:
        dataset = opened(folder, columns=["id", "x"])
        loader = torch.utils.data.DataLoader(dataset, 10, collate_fn=bf.default_collate)
        assert [i for batch in loader for i in batch["id"].tolist()] == list(range(100))


class TestBatches:
    def test_have_the_types_of_the_columns(self, folder: Path) -> None:
        (first, *_) = batches(opened(folder, batch_format="torch"), 10)
        assert (first["id"].dtype, first["x"].dtype, first["side"].dtype) == (torch.int64, torch.float32, torch.bool)
        assert "__key__" not in first
        (first, *_) = batches(opened(folder, batch_format="numpy"), 10)
        assert [first[name].dtype.str for name in first] == ["<i8", "<f4", "|O", "|b1"]
        first["x"][0] = 5  # they are the loop's own

    def test_are_given_whole_to_collate(self, folder: Path) -> None:
        dataset = opened(folder, batch_format="arrow")
        assert sum(batches(dataset, 10, collate=lambda batch: batch.num_rows)) == 100

    def test_do_not_go_with_a_function_of_one_sample(self, folder: Path) -> None:
        with pytest.raises(ConfigError, match="batch_format='arrow' gives whole batches, but decode="):
            bf.Loader(opened(folder, batch_format="arrow").map(dict), 10)


class TestFetching:
    def test_takes_footers_and_the_columns_asked_for_once(self, folder: Path, tmp_path: Path) -> None:
        dataset, reader = remote(folder, tmp_path / "cache", columns=["x"])
        assert [sample["x"] for sample in dataset] == [i / 4 for i in range(100)]
        stored = 0
        for path in sorted(folder.iterdir()):
            footer = pq.read_metadata(path)
            stored += sum(footer.row_group(g).column(1).total_compressed_size for g in range(footer.num_row_groups))
        footers = sum(
            path.stat().st_size for path in folder.iterdir()
        )  # each file is smaller than what is read at once
        assert dataset.stats().bytes_fetched == stored + footers
        assert len(reader.calls) == 4

    def test_takes_nothing_where_another_process_has_decoded(self, folder: Path, tmp_path: Path) -> None:
        remote(folder, tmp_path / "cache")[0].__getitems__(range(100))
        dataset, reader = remote(folder, tmp_path / "cache")
        assert ids(dataset) == list(range(100))
        assert reader.calls == []

    def test_of_small_row_groups_is_one_request_for_many(self, tmp_path: Path) -> None:
        folder = put(tmp_path / "d" / "a.parquet", {"id": np.arange(3000)}, row_group_size=10)
        dataset, reader = remote(folder, tmp_path / "cache")
        assert len(dataset.chunks()) == 1
        assert ids(dataset) == list(range(3000))
        assert len(reader.calls) == 2

    def test_of_a_huge_row_group_goes_in_rounds_and_takes_each_byte_once(self, tmp_path: Path) -> None:
        rng = np.random.default_rng(0)
        table = {"id": np.arange(20000), "blob": [rng.bytes(2048) for _ in range(20000)]}
        folder = put(tmp_path / "d" / "a.parquet", table, compression=None, use_dictionary=False)
        dataset, reader = remote(folder, tmp_path / "cache", batch_format="numpy")
        sums = {i: bytes(table["blob"][i][:8]) for i in range(20000)}
        for batch in batches(dataset, 500, shuffle=True):
            assert [blob[:8] for blob in batch["blob"]] == [sums[i] for i in batch["id"].tolist()]
        size = (folder / "a.parquet").stat().st_size
        assert size <= dataset.stats().bytes_fetched <= size + 70_000
        assert max(sum(range.length for range in call) for call in reader.calls) <= 9 << 20

    @settings(max_examples=60, deadline=None)
    @given(st.data())
    def test_by_columns_gives_any_bytes_asked_for(self, data: st.DataObject) -> None:
        whole = np.random.default_rng(0).bytes(50_000)
        cuts = sorted(data.draw(st.sets(st.integers(0, 50_000), min_size=2, max_size=6)))
        spans = list(zip(cuts[::2], cuts[1::2], strict=False))
        with ColumnFile(lambda asked: [whole[a:b] for a, b in asked], spans, len(whole)) as file:
            for start, length in data.draw(
                st.lists(st.tuples(st.integers(0, 50_000), st.integers(0, 9000)), max_size=20)
            ):
                file.seek(start)
                assert bytes(file.read(length)) == whole[start : start + length]


class TestColumns:
    def test_come_in_the_order_asked_for(self, folder: Path) -> None:
        assert list(opened(folder, columns=["text", "id"])[0]) == ["__key__", "text", "id"]

    def test_that_are_not_there_are_an_error_that_lists_those_that_are(self, folder: Path) -> None:
        with pytest.raises(ConfigError, match=r"no column 'y'; it has \['id', 'x', 'text', 'side'\]"):
            opened(folder, columns=["y"])

    def test_of_other_types_in_other_files_are_widened_where_that_is_exact(self, tmp_path: Path) -> None:
        put(tmp_path / "d" / "a.parquet", {"n": pa.array([1], pa.int32()), "s": pa.array(["a"]).dictionary_encode()})
        folder = put(tmp_path / "d" / "b.parquet", {"n": pa.array([2**40], pa.int64()), "s": ["b"]})
        assert rows(opened(folder)) == [{"n": 1, "s": "a"}, {"n": 2**40, "s": "b"}]

    def test_of_types_that_do_not_fit_are_an_error_that_names_both_files(self, tmp_path: Path) -> None:
        put(tmp_path / "d" / "a.parquet", {"n": pa.array([1], pa.int64())})
        folder = put(tmp_path / "d" / "b.parquet", {"n": pa.array([1.5])})
        with pytest.raises(FormatError, match=r"column 'n' is int64 in .*a\.parquet and double in .*b\.parquet"):
            opened(folder)

    def test_that_only_some_files_have_are_an_error(self, tmp_path: Path) -> None:
        put(tmp_path / "d" / "a.parquet", {"n": [1]})
        folder = put(tmp_path / "d" / "b.parquet", {"n": [1], "m": [1]})
        with pytest.raises(FormatError, match=r"b\.parquet has column 'm' and .*a\.parquet has none"):
            opened(folder)
        assert rows(opened(folder, columns=["n"])) == [{"n": 1}, {"n": 1}]

    def test_of_every_kind_come_out_exact(self, tmp_path: Path) -> None:
        utc = datetime.UTC
        columns = {
            "d": pa.array([decimal.Decimal("12345678901234567890.12")], pa.decimal128(38, 2)),
            "us": pa.array([datetime.datetime(2024, 1, 2, 3, 4, 5, 6, utc)], pa.timestamp("us", "UTC")),
            "ns": pa.array([1_700_000_000_123_456_789], pa.timestamp("ns")),
            "day": pa.array([datetime.date(1969, 12, 31)]),
            "time": pa.array([datetime.time(1, 2, 3, 4)]),
            "u": pa.array([2**64 - 1], pa.uint64()),
            "h": pa.array(np.array([0.5], "f2")),
            "raw": pa.array([b"\0\xff"]),
            "deep": pa.array([[{"t": 5}, None]], pa.list_(pa.struct({"t": pa.duration("ns")}))),
        }
        folder = put(tmp_path / "d" / "a.parquet", columns)
        assert told(opened(folder)[0]) == {
            "d": decimal.Decimal("12345678901234567890.12"),
            "us": datetime.datetime(2024, 1, 2, 3, 4, 5, 6, utc),
            "ns": np.datetime64(1_700_000_000_123_456_789, "ns"),
            "day": datetime.date(1969, 12, 31),
            "time": datetime.time(1, 2, 3, 4),
            "u": 2**64 - 1,
            "h": 0.5,
            "raw": b"\0\xff",
            "deep": [{"t": np.timedelta64(5, "ns")}, None],
        }
        (batch,) = batches(opened(folder, batch_format="torch"))
        assert [batch[name].tolist()[0] for name in ("ns", "day", "u")] == [1_700_000_000_123_456_789, -1, 2**64 - 1]
        assert batch["h"].dtype == torch.float16
        (batch,) = batches(opened(folder, batch_format="numpy"))
        assert (batch["us"].dtype, batch["day"].dtype) == (np.dtype("M8[us]"), np.dtype("M8[D]"))

    def test_fill_must_fit_them(self, folder: Path) -> None:
        with pytest.raises(ConfigError, match=r"fill=.*'id': 'a'.* does not fit int64"):
            opened(folder, fill={"id": "a"})
        with pytest.raises(ConfigError, match="fill names 'y'"):
            opened(folder, fill={"y": 1})


class TestFilters:
    @pytest.mark.parametrize(
        ("filters", "groups"),
        [
            ([("id", ">=", 85)], [85]),
            ([("id", "<", 25)], [0]),
            ([("id", "=", 60)], [60]),
            ([("id", "in", [3, 55])], [0, 50]),
            ([("id", ">", 20), ("id", "<=", 49)], [0, 25]),
            ([[("id", "<", 10)], [("id", ">", 90)]], [0, 85]),
            ([("text", "=", "t99")], [85]),
            ([("id", ">", 1000)], []),
        ],
    )
    def test_leave_out_row_groups_that_can_not_match(self, folder: Path, filters: Any, groups: list[int]) -> None:
        sizes = {0: 25, 25: 25, 50: 10, 60: 25, 85: 15}
        dataset = opened(folder, filters=filters)
        assert ids(dataset) == [i for first in groups for i in range(first, first + sizes[first])]

    def test_keep_row_numbers_of_the_file(self, folder: Path) -> None:
        assert opened(folder, filters=[("id", ">=", 85)])[0]["__key__"] == "060.parquet[25]"

    def test_make_other_data_sets_to_resume(self, folder: Path) -> None:
        some, all_rows = opened(folder, filters=[("id", ">=", 85)]), opened(folder)
        assert some.index.fingerprint != all_rows.index.fingerprint

    @pytest.mark.parametrize("filters", ["id > 3", [("id", "~", 3)], [("id", "in", 3)], [], [("id", ">")]])
    def test_that_are_none_are_told_of(self, filters: Any) -> None:
        with pytest.raises(ConfigError, match="filters"):
            bf.Parquet(filters=filters)

    @pytest.mark.parametrize("filters", [[("y", ">", 3)], [("id", ">", "a")]])
    def test_that_do_not_fit_the_columns_are_told_of(self, folder: Path, filters: Any) -> None:
        with pytest.raises(ConfigError, match="filters"):
            opened(folder, filters=filters)


class TestPartitions:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        for number, part in enumerate(
            ["year=2023/lang=de", "year=2024/lang=a%20b", "year=2024/lang=__HIVE_DEFAULT_PARTITION__"]
        ):
            put(tmp_path / "d" / part / "x.parquet", {"id": [2 * number, 2 * number + 1]})
        (tmp_path / "d" / "_SUCCESS").touch()
        (tmp_path / "d" / "_metadata").write_bytes(b"PAR1")
        return tmp_path / "d"

    def test_are_columns(self, folder: Path) -> None:
        dataset = bf.open_dataset(folder, cache=None, progress=False)
        found = [(row["id"], row["year"], row["lang"]) for row in rows(dataset)]
        languages = ["de", "de", None, None, "a b", "a b"]  # in the order of keys
        assert sorted(found, key=lambda row: row[0]) == [
            (0, 2023, "de"), (1, 2023, "de"), (2, 2024, "a b"), (3, 2024, "a b"), (4, 2024, None), (5, 2024, None)
        ]  # fmt: skip
        assert [lang for _, _, lang in found] == languages
        assert batches(dataset)[0]["year"].tolist() == [2023, 2023, 2024, 2024]

    def test_can_be_all_that_is_read(self, folder: Path) -> None:
        assert rows(opened(folder, columns=["year"])) == [{"year": 2023}] * 2 + [{"year": 2024}] * 4

    def test_are_filtered_before_their_files_are_looked_at(self, folder: Path) -> None:
        (folder / "year=2023" / "lang=de" / "x.parquet").write_bytes(b"no Parquet file")
        dataset = opened(folder, filters=[("year", ">", 2023), ("lang", "=", "a b")])
        assert rows(dataset) == [{"id": 2, "year": 2024, "lang": "a b"}, {"id": 3, "year": 2024, "lang": "a b"}]


VALUES = st.one_of(
    st.tuples(st.just(pa.int64()), st.just(st.integers(-(2**63), 2**63 - 1))),
    st.tuples(st.just(pa.float64()), st.just(st.floats(allow_nan=False))),
    st.tuples(st.just(pa.string()), st.just(st.text(max_size=5))),
    st.tuples(st.just(pa.bool_()), st.just(st.booleans())),
    st.tuples(st.just(pa.list_(pa.int32())), st.just(st.lists(st.none() | st.integers(-9, 9), max_size=4))),
    st.tuples(
        st.just(pa.struct({"a": pa.int8(), "b": pa.list_(pa.string())})),
        st.just(st.fixed_dictionaries({"a": st.none() | st.integers(-9, 9), "b": st.lists(st.text(max_size=2))})),
    ),
    st.tuples(st.just(pa.date32()), st.just(st.dates())),
)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_random_tables_are_read_as_pyarrow_reads_them(data: st.DataObject) -> None:
    length = data.draw(st.integers(0, 40), "rows")
    columns = {}
    for number in range(data.draw(st.integers(1, 3), "columns")):
        type, values = data.draw(VALUES)
        columns[f"c{number}"] = pa.array([data.draw(st.none() | values) for _ in range(length)], type)
    table = pa.table(columns)
    file = bytes_of(table, row_group_size=data.draw(st.integers(1, 50)), data_page_size=64)
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "d").mkdir()
        (Path(name) / "d" / "x.parquet").write_bytes(file)
        dataset = opened(Path(name) / "d")
        assert [told(sample) for sample in dataset.__getitems__(range(length))] == table.to_pylist()
        if length:
            got = batches(opened(Path(name) / "d", batch_format="arrow"), 7)
            assert [row for batch in got for row in batch.to_pylist()] == table.to_pylist()


def test_other_formats_do_not_load_pyarrow(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_bytes(b'{"a": 1}\n')
    program = (
        "import sys, bucketfeed as bf\n"
        f"assert bf.open_dataset({str(tmp_path)!r}, cache=None, progress=False)[0]['a'] == 1\n"
        "assert 'pyarrow' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_without_pyarrow_it_says_what_to_install(folder: Path) -> None:
    program = (
        "import sys, bucketfeed as bf\n"
        "sys.modules['pyarrow'] = None\n"
        f"try: bf.open_dataset({str(folder)!r}, cache=None, progress=False)\n"
        "except bf.errors.ConfigError as e: assert \"pip install 'bucketfeed[parquet]'\" in str(e)\n"
        "else: raise SystemExit('opened')"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
