"""Labels from folders, and from tables by key."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sources import LINES, LINES_IN_ORDER, RAW, TARS, fed, number_of

import bucketfeed as bf
from bucketfeed.data.table import Column
from bucketfeed.errors import ConfigError, DecodeError

ANIMALS = {"zebra": 3, "ant": 4, "Cat": 2}


@pytest.fixture
def pets(tmp_path: Path) -> bf.MapDataset:
    for animal, count in ANIMALS.items():
        for number in range(count):
            path = tmp_path / "pets" / animal / f"year{number}" / f"{animal}.{number}.jpg"
            path.parent.mkdir(parents=True)
            path.write_bytes(f"{animal} {number}".encode())
    return bf.open_dataset(tmp_path / "pets", cache=None)


def animal_of(sample: dict) -> str:
    return sample["jpg"].decode().split()[0]


class TestFolders:
    def test_are_counted_in_the_order_of_their_names(self, pets: bf.MapDataset) -> None:
        labelled = bf.folder_labels(pets)
        assert labelled.classes == ("Cat", "ant", "zebra")
        assert pets.classes == ()
        for sample in labelled:
            assert labelled.classes[sample["label"]] == animal_of(sample)
        assert labelled[0] == {"__key__": "Cat/year0/Cat.0", "jpg": b"Cat 0", "label": 0}

    def test_stay_the_same_in_every_view_and_process(self, pets: bf.MapDataset) -> None:
        one = bf.folder_labels(pets.select([8, 0]).map(animal_of))
        assert list(one) == [{"value": "zebra", "label": 2}, {"value": "Cat", "label": 0}]
        train, test = bf.folder_labels(pets.map(animal_of)).split(0.5, 3)
        labels = {(sample["value"], sample["label"]) for part in (train, test) for sample in part}
        assert labels == {("Cat", 0), ("ant", 1), ("zebra", 2)}
        assert train.classes == test.classes == ("Cat", "ant", "zebra")
        mapped = train.map(lambda sample: sample["label"])
        assert list(pickle.loads(pickle.dumps(mapped))) == list(mapped)
        with bf.Loader(mapped, 2, num_workers=1) as loader:
            assert fed(loader) == list(mapped)

    def test_at_any_level_and_by_given_names(self, pets: bf.MapDataset) -> None:
        assert bf.folder_labels(pets, level=-1).classes == ("year0", "year1", "year2", "year3")
        other = bf.folder_labels(pets, classes=["zebra", "Cat", "newt", "ant"], field="animal")
        assert [sample["animal"] for sample in other] == [1] * 2 + [3] * 4 + [0] * 3
        assert other.classes == ("zebra", "Cat", "newt", "ant")

    def test_label_the_samples_of_a_shard_alike_and_join_with_other_data(
        self, pets: bf.MapDataset, tmp_path: Path
    ) -> None:
        for name in ("b", "a"):
            (tmp_path / "lines" / name).mkdir(parents=True)
            (tmp_path / "lines" / name / "1.jsonl").write_text('{"x": 1}\n{"x": 2}\n')
        lines = bf.folder_labels(bf.open_dataset(tmp_path / "lines", cache=None))
        assert [(sample["x"], sample["label"]) for sample in lines] == [(1, 0), (2, 0), (1, 1), (2, 1)]
        both = bf.concat([lines, bf.folder_labels(pets)])
        assert [sample["label"] for sample in both] == [0, 0, 1, 1] + [0] * 2 + [1] * 4 + [2] * 3
        assert both.classes == ()
        assert bf.concat([lines, lines]).classes == ("a", "b")

    def test_that_are_not_there_are_named(self, pets: bf.MapDataset, raw: bf.MapDataset) -> None:
        with pytest.raises(ConfigError, match=r"raw/00000\.bin has no folder at level 0, and so 30 of 30 objects"):
            bf.folder_labels(raw)
        with pytest.raises(ConfigError, match=r"ant\.0\.jpg has folder 'ant', none of the classes .* 4 of 9"):
            bf.folder_labels(pets, classes=["Cat", "zebra"])
        assert len(bf.folder_labels(pets.take(2), classes=["Cat"])) == 2
        with pytest.raises(ConfigError, match="different names"):
            bf.folder_labels(pets, classes=["a", "a"])
        with pytest.raises(ConfigError, match="level must be a whole number, not '0'"):
            bf.folder_labels(pets, level="0")  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="folder_labels of a mix"):
            bf.folder_labels(bf.mix([pets], [1]))
        with pytest.raises(DecodeError, match="a field 'jpg' of its own"):
            bf.folder_labels(pets, field="jpg")[0]


def table(numbers: range) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "file": [f"{number:05}.bin" for number in numbers],
            "age": [number / 2 for number in numbers],
            "name": [f"näme {number}" for number in numbers],
        }
    )


class TestJoin:
    @pytest.mark.parametrize("kind", ["frame", "csv", "jsonl", "dict", "mapped"])
    def test_gives_each_sample_its_row(self, raw: bf.MapDataset, tmp_path: Path, kind: str) -> None:
        frame = table(RAW[::-1])
        if kind == "csv":
            frame.to_csv(tmp_path / "labels.csv", index=False)
        if kind == "jsonl":
            frame.to_json(tmp_path / "labels.jsonl", orient="records", lines=True, force_ascii=False)
        csv = bf.Csv(dtypes={"age": "float64"})
        labels = {
            "frame": lambda: frame,
            "csv": lambda: bf.open_dataset(tmp_path / "labels.csv", format=csv, cache=None),
            "jsonl": lambda: bf.open_dataset(tmp_path / "labels.jsonl", cache=None),
            "dict": lambda: frame.set_index("file").to_dict("index"),
            "mapped": lambda: raw.map(
                lambda sample: {
                    "file": sample["__key__"] + ".bin",
                    "age": number_of(sample) / 2,
                    "name": f"näme {number_of(sample)}",
                }
            ),
        }[kind]()
        joined = bf.join(raw, labels, on="file", key="name")
        assert len(joined) == 30
        for number, sample in enumerate(joined):
            assert number_of(sample) == number
            assert sample.keys() == {"__key__", "bin", "age", "name"}
            assert (sample["age"], sample["name"]) == (number / 2, f"näme {number}")

    @pytest.mark.parametrize(
        ("key", "form"),
        [("__key__", "{:05}"), ("path", "{:05}.bin"), ("stem", "{:05}"), (lambda path: int(path[:5]), "{}")],
    )
    def test_finds_objects_by_their_names_without_reading(self, raw: bf.MapDataset, key: str, form: str) -> None:
        joined = bf.join(raw, {form.format(number): number * 3 for number in RAW}, key=key)
        assert joined.reader.counter.counts().requests == 0
        assert [sample["label"] for sample in joined] == [number * 3 for number in RAW]

    def test_finds_samples_of_shards_by_their_fields(self, tars: bf.MapDataset, lines: bf.MapDataset) -> None:
        labels = {f"{number:05}": -number for number in TARS}
        assert [sample["label"] for sample in bf.join(tars, labels)] == [-number for number in TARS]
        squares = bf.join(lines, {number: number**2 for number in LINES}, key="number")
        assert [sample["label"] for sample in squares] == [number**2 for number in LINES_IN_ORDER]
        halves = bf.join(
            lines, {number // 2: number // 2 for number in LINES}, key=lambda sample: sample["number"] // 2
        )
        assert [sample["label"] for sample in halves] == [number // 2 for number in LINES_IN_ORDER]

    def test_of_what_was_decoded_comes_after_it(self, raw: bf.MapDataset) -> None:
        labels = {f"{number:05}": {"x": number, "y": None} for number in RAW}
        joined = bf.join(raw.map(number_of), labels).map(lambda sample: (sample["value"], sample["x"], sample["y"]))
        assert list(joined) == [(number, number, None) for number in RAW]
        twice = bf.join(bf.join(raw, labels), {f"{number:05}": "z" for number in RAW})
        assert twice[3] == {**raw[3], "x": 3, "y": None, "label": "z"}

    def test_leaves_out_what_has_no_row_only_where_told(self, raw: bf.MapDataset) -> None:
        with pytest.raises(
            ConfigError,
            match=r"20 of 30 samples have no row .* first is '00010\.bin' \(.*00010\.bin \[0:\d+\]\).* 10 keys such as",
        ):
            bf.join(raw, table(range(10)), on="file", key="path")
        joined = bf.join(raw, table(range(25, 60)), on="file", key="path", how="inner").map(number_of)
        assert len(joined) == 5
        assert sorted(fed(bf.Loader(joined, 5, shuffle=True))) == [25, 26, 27, 28, 29]
        with pytest.raises(ConfigError, match="30 of 30 samples have no row"):
            bf.join(raw, table(RAW), on="file", key="stem", how="inner")

    def test_refuses_keys_that_come_twice(self, raw: bf.MapDataset) -> None:
        frame = pd.concat([table(RAW), table(range(7, 9)), table(range(7, 8))])
        with pytest.raises(ConfigError, match=r"2 of 30 keys come more than once .* '00007\.bin', in rows 7, 30, 32 "):
            bf.join(raw, frame, on="file", key="path")

    def test_names_what_it_can_not_take(self, raw: bf.MapDataset, lines: bf.MapDataset) -> None:
        with pytest.raises(ConfigError, match=r"no column 'key'.*\['file', 'age', 'name'\]"):
            bf.join(raw, table(RAW))
        with pytest.raises(ConfigError, match="not list"):
            bf.join(raw, [1])
        with pytest.raises(ConfigError, match="'left' or 'inner', not 'outer'"):
            bf.join(raw, {}, how="outer")  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=r"\.jsonl \[0:\d+\]\) has no field 'id' to be found by"):
            bf.join(lines, {1: 2}, key="id")
        with pytest.raises(ConfigError, match="are int, not rows of columns"):
            bf.join(raw, lines.map(number_of))
        with pytest.raises(DecodeError, match="join: the sample has a field 'bin' of its own"):
            bf.join(raw, {f"{number:05}": {"bin": 1} for number in RAW})[0]

    def test_travels_small_and_is_read_by_workers_and_views(self, raw: bf.MapDataset) -> None:
        many = raw.repeat(20_000)
        labels = {f"{number:05}": number for number in range(300_000)}
        joined = bf.join(many, labels).map(lambda sample: (number_of(sample), sample["label"]))
        assert len(pickle.dumps(joined)) < 10_000
        part = joined.select(np.arange(0, 600_000, 599))
        with bf.Loader(part, 100, num_workers=1, shuffle=True) as loader:
            first, second = next(iter(loader))
        assert first.tolist() == second.tolist()


VALUES = st.one_of(
    st.lists(st.booleans()),
    st.lists(st.integers()),
    st.lists(st.floats(allow_nan=False)),
    st.lists(st.integers(0, 9) | st.floats(0, 1)),
    st.lists(st.text()),
    st.lists(st.text() | st.none() | st.lists(st.integers())),
)


@given(VALUES)
def test_a_column_gives_back_what_it_was_made_of(values: list) -> None:
    column = pickle.loads(pickle.dumps(Column(values)))
    assert [column[row] for row in range(len(values))] == values
