"""Views: the samples asked for, each with its bytes, in every way that a data set is read."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from many import SAMPLES, fed, number_of, numbers, rest

import bucketfeed as bf
from bucketfeed.errors import ConfigError, DecodeError, ResumeError
from bucketfeed.formats.view import ViewIndex
from bucketfeed.testing.readers import RecordingReader

ALL = list(range(SAMPLES))
FROZEN = [30, 33, 41, 55, 59, 76, 82, 88, 89, 93]  # the second part of 0.9 with seed 17, for ever


def order(dataset: bf.MapDataset) -> list[int]:
    """The numbers written, in the order of the data set: raw objects come sorted by folder."""
    return numbers(dataset)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(start=st.integers(-120, 120), stop=st.integers(-120, 120), step=st.integers(-9, 9).filter(bool))
def test_a_slice_is_the_slice_of_a_list_and_costs_nothing(tars: bf.MapDataset, start: int, stop: int, step: int):
    view = tars.select(slice(start, stop, step))
    assert numbers(view) == ALL[start:stop:step]
    assert isinstance(view.index, ViewIndex)
    assert isinstance(view.index.numbers.listed, range)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(-SAMPLES, SAMPLES - 1), max_size=60), st.integers(1, 2000))
def test_any_list_of_numbers_is_read_as_it_stands_at_any_chunk_size(tars: bf.MapDataset, which: list[int], chunk: int):
    view = tars.select(which)
    wanted = [ALL[i] for i in which]
    assert numbers(view[i] for i in range(len(view))) == wanted
    assert numbers(view.__getitems__(range(len(view)))) == wanted
    if which:
        loader = bf.Loader(view.map(number_of), 7, tail="uneven", shuffle=True, chunk_bytes=chunk)
        assert sorted(fed(loader)) == sorted(wanted)
        assert fed(bf.Loader(view.map(number_of), 7, tail="uneven", chunk_bytes=chunk)) == wanted


def test_a_mask_takes_the_samples_that_are_true(dataset: bf.MapDataset):
    whole = order(dataset)
    mask = np.array(whole) % 5 == 2
    assert order(dataset.select(mask)) == [number for number in whole if number % 5 == 2]
    assert order(dataset.select(mask.tolist())) == order(dataset.select(np.flatnonzero(mask)))
    assert order(dataset.select(torch.from_numpy(mask))) == order(dataset.select(mask))


def test_a_view_of_a_view_is_one_view(tars: bf.MapDataset):
    view = tars.select([5, 50, 7, 99, 7]).select([4, 0]).select(slice(None, None, -1))
    assert order(view) == [5, 7]
    assert isinstance(view.index, ViewIndex)
    assert not isinstance(view.index.base, ViewIndex)
    assert order(tars.select(slice(10, 90, 2)).select(slice(5, 0, -2))) == [20, 16, 12]


def test_take_and_repeat_are_views_too(dataset: bf.MapDataset):
    first = order(dataset)[:3]
    assert order(dataset.take(3)) == first
    assert order(dataset.take(3).repeat(2).repeat(2)) == first * 4
    assert order(dataset.take(3).repeat(4).take(5)) == (first * 2)[:5]
    assert len(dataset.take(1000)) == SAMPLES
    assert len(dataset.take(0)) == 0
    loader = bf.Loader(dataset.repeat(3).map(number_of), 50, shuffle=True)
    assert sorted(fed(loader)) == sorted(ALL * 3)


def test_what_no_view_can_be_made_of_is_named(tars: bf.MapDataset):
    with pytest.raises(IndexError, match=r"sample 100 of a data set of 100 samples .*tars"):
        tars.select([3, 100])
    with pytest.raises(IndexError, match="sample -101"):
        tars.select([-101])
    with pytest.raises(ConfigError, match=r"99 truth values, but .* has 100 samples"):
        tars.select([True] * 99)
    with pytest.raises(ConfigError, match="list of float64"):
        tars.select([0.5])
    with pytest.raises(ConfigError, match=r"whole number.*not 0"):
        tars.repeat(0)
    with pytest.raises(IndexError, match="sample 3 of a data set of 3 samples"):
        tars.take(3)[3]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_workers_give_what_threads_give(tars: bf.MapDataset, num_workers: int):
    view = tars.select(np.random.default_rng(0).permutation(SAMPLES)[:60]).map(lambda sample: number_of(sample))
    with bf.Loader(view, 12, shuffle=True, seed=4, num_workers=num_workers) as loader:
        got = [fed(loader) for _ in range(2)]
    expected = bf.Loader(view, 12, shuffle=True, seed=4)
    assert got == [fed(expected) for _ in range(2)]


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=st.integers(1, 4), before=st.sampled_from([1, 2, 3, 4]), after=st.sampled_from([1, 2, 3, 4]))
def test_a_view_is_resumed_on_any_number_of_ranks(dataset: bf.MapDataset, cut: int, before: int, after: int):
    view = dataset.split(0.7, 1)[0].map(number_of)
    first, second = rest(view, cut, before, after, shuffle=True, seed=2, tail="uneven")
    assert first + second == fed(bf.Loader(view, 12, shuffle=True, seed=2, tail="uneven"))


def test_the_state_of_another_view_is_refused(tars: bf.MapDataset):
    state = bf.Loader(tars.select(slice(0, 50)), 10).state_dict()
    bf.Loader(tars.select(list(range(50))), 10).load_state_dict(state)  # the same numbers, however they are given
    for other in (tars, tars.select(slice(1, 51)), tars.select(slice(49, None, -1)), tars.take(25).repeat(2)):
        with pytest.raises(ResumeError, match="fingerprint"):
            bf.Loader(other, 10).load_state_dict(state)


class TestSplit:
    def test_parts_share_nothing_and_lack_nothing(self, dataset: bf.MapDataset):
        train, test = dataset.split(0.9, 17)
        assert (len(train), len(test)) == (90, 10)
        assert sorted(order(train) + order(test)) == ALL
        place = {number: i for i, number in enumerate(order(dataset))}
        for part in (train, test):
            places = [place[number] for number in order(part)]
            assert places == sorted(places)

    def test_depends_on_the_seed_and_nothing_else(self, raw: bf.MapDataset, tars: bf.MapDataset):
        assert order(tars.split(0.9, 17)[1]) == FROZEN
        assert raw.index.fingerprint != tars.index.fingerprint
        assert [raw.split(0.9, 17)[1][i]["__key__"] for i in range(10)] == [raw[i]["__key__"] for i in FROZEN]
        assert order(tars.split(0.9, 17)[1]) != order(tars.split(0.9, 18)[1])

    def test_may_give_all_to_one_part(self, tars: bf.MapDataset):
        assert [len(part) for part in tars.split(1)] == [SAMPLES, 0]
        assert [len(part) for part in tars.split(0.0)] == [0, SAMPLES]

    @pytest.mark.parametrize("seed", range(5))
    def test_by_shard_parts_no_object(self, tars: bf.MapDataset, seed: int):
        train, test = tars.split(0.6, seed, by="shard")
        assert (len(train), len(test)) == (60, 40)
        assert {number // 20 for number in order(train)} & {number // 20 for number in order(test)} == set()

    def test_by_groups_parts_no_group(self, tars: bf.MapDataset):
        patients = [f"patient {number % 7}" for number in ALL]
        train, test = tars.split(0.7, 3, by=patients)
        assert sorted(order(train) + order(test)) == ALL
        assert {number % 7 for number in order(train)} & {number % 7 for number in order(test)} == set()
        assert abs(len(train) - 70) <= 8

    def test_of_a_wrong_share_or_group_is_an_error(self, tars: bf.MapDataset):
        for fraction in (1.5, "0.9", True):
            with pytest.raises(ConfigError, match="from 0 to 1"):
                tars.split(fraction)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="'shard'"):
            tars.split(0.5, by="shards")  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="not one for each of the 100 samples"):
            tars.split(0.5, by=[1, 2])

    def test_of_a_million_samples_pickles_small_and_its_file_goes_with_its_process(self, tmp_path: Path):
        program = (
            "import os, pickle, tempfile, numpy as np, bucketfeed as bf\n"
            "from bucketfeed.formats.view import Numbers\n"
            "numbers = Numbers.of(np.flatnonzero(np.arange(1_000_000) % 3))\n"
            "again = pickle.loads(pickle.dumps(numbers))\n"
            "assert len(pickle.dumps(numbers)) < 1000\n"
            "assert (again.at(np.arange(666_666)) == numbers.at(np.arange(666_666))).all()\n"
            "assert os.listdir(tempfile.gettempdir())\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", program], env={"TMPDIR": str(tmp_path), "PYTHONPATH": ":".join(sys.path)}, timeout=60
        )
        assert done.returncode == 0
        assert list(tmp_path.iterdir()) == []


class TestMap:
    def test_comes_after_decode_and_after_other_maps(self, tars: bf.MapDataset):
        view = tars.map(number_of).map(lambda number: number * 2).select([3, 4])
        assert list(view) == [6, 8]
        assert list(pickle.loads(pickle.dumps(view))) == [6, 8]
        assert list(tars.take(1).map(lambda sample: sorted(sample))) == [["__key__", "bin"]]

    def test_an_error_names_the_sample_and_its_place(self, dataset: bf.MapDataset):
        view = dataset.select([7]).map(number_of).map(lambda number: 1 // (number - number))
        with pytest.raises(DecodeError, match=r"number 0, .* \[\d+:\d+\], fields \w+\): ZeroDivisionError"):
            view[0]

    def test_takes_a_function(self, tars: bf.MapDataset):
        with pytest.raises(ConfigError, match="a function"):
            tars.map(3)  # type: ignore[arg-type]


class TestReading:
    def opened(self, folder: Path, tmp_path: Path) -> tuple[bf.MapDataset, RecordingReader]:
        dataset = bf.open_dataset(folder / "tars", cache=bf.DiskCache(tmp_path / "cache", "100MB"))
        reader = RecordingReader(dataset.reader.inner)  # type: ignore[attr-defined]
        return dataset._with(reader=bf.CachedReader(reader, bf.DiskCache(tmp_path / "cold", "100MB"))), reader

    def test_a_chunk_is_fetched_once_for_all_views_of_it(self, folder: Path, tmp_path: Path):
        dataset, reader = self.opened(folder, tmp_path)
        for part in dataset.split(0.5):
            assert len(fed(bf.Loader(part.map(number_of), 10, shuffle=True))) == 50
        asked = [range for call in reader.calls for range in call if range.length > 4096]
        assert len(asked) == len(set(asked)) == 5

    def test_a_sparse_view_reads_its_samples_and_no_more(self, folder: Path, tmp_path: Path):
        dataset, reader = self.opened(folder, tmp_path)
        view = dataset.select([3, 4, 55, 90])
        assert fed(bf.Loader(view.map(number_of), 4)) == [3, 4, 55, 90]
        assert {range for call in reader.calls for range in call} == {view.index.range(i) for i in (0, 1, 2, 3)}


def test_a_view_tells_the_line_of_a_bad_sample_and_may_leave_it_out(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("1\n2\nno\n4\n")
    ds = bf.open_dataset(tmp_path, cache=None).select([3, 2, 0])
    with pytest.raises(bf.errors.FormatError, match=r"a\.jsonl.*\(line 3 of the object\)"):
        ds[1]
    skipping = bf.open_dataset(tmp_path, cache=None, on_error="skip").select([3, 2, 0])
    assert [sample["json"] for sample in skipping.__getitems__([0, 1, 2])] == [4, 1]
    assert skipping.stats().skipped == 1


def test_parts_of_an_array_are_arrays(tmp_path: Path) -> None:
    values = np.arange(60).reshape(20, 3)
    np.save(tmp_path / "x.npy", values)
    first, second = bf.open_dataset(tmp_path / "x.npy", cache=None).split(0.8, seed=3)
    rows = [batch["array"] for part in (first, second) for batch in bf.Loader(part, 4, shuffle=True)]
    assert sorted(row.tolist() for batch in rows for row in batch) == values.tolist()


def test_views_of_compressed_lines_read_from_the_cache(tmp_path: Path) -> None:
    import gzip

    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b"".join(b"%d\n" % n for n in range(100))))
    ds = bf.open_dataset(tmp_path, cache=bf.DiskCache(tmp_path / "cache", "1GB")).select(slice(90, 10, -1))
    batches = list(bf.Loader(ds, 8, shuffle=True))
    assert sorted(n for batch in batches for n in batch["json"].tolist()) == list(range(11, 91))
