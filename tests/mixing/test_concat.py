"""Data sets one after the other: each sample by its own part, in every way that a data set is read."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sources import LINES_IN_ORDER, RAW, TARS, fed, fed_to_ranks, number_of, numbers
from torch.utils.data import DataLoader

import bucketfeed as bf
from bucketfeed.errors import ConfigError, DecodeError, FormatError, ResumeError
from bucketfeed.testing.readers import RecordingReader

ALL = [*RAW, *TARS, *LINES_IN_ORDER]


@pytest.fixture
def joined(raw: bf.MapDataset, tars: bf.MapDataset, lines: bf.MapDataset) -> bf.MapDataset:
    return bf.concat([raw, tars, lines])


def test_has_the_samples_of_all_parts_in_order(joined: bf.MapDataset) -> None:
    assert len(joined) == len(ALL)
    assert numbers(joined) == ALL
    assert numbers(joined.__getitems__(range(len(ALL) - 1, -1, -1))) == ALL[::-1]
    assert number_of(joined[-1]) == ALL[-1]
    with pytest.raises(IndexError, match=r"sample 180 of a data set of 180 samples \(.*raw/ \+ .*tars/ \+ .*lines/\)"):
        joined[180]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(which=st.lists(st.integers(0, len(ALL) - 1), min_size=1, max_size=60), chunk=st.integers(1, 2000))
def test_views_of_it_and_it_of_views_are_what_lists_give(
    raw: bf.MapDataset, tars: bf.MapDataset, lines: bf.MapDataset, which: list[int], chunk: int
) -> None:
    view = bf.concat([raw, tars, lines]).select(which)
    again = bf.concat([view, lines.take(3), view]).select(slice(None, None, 2))
    wanted = [ALL[i] for i in which]
    expected = [*wanted, *LINES_IN_ORDER[:3], *wanted][::2]
    assert numbers(again.__getitems__(range(len(again)))) == expected
    loader = bf.Loader(again.map(number_of), 7, tail="uneven", shuffle=True, chunk_bytes=chunk)
    assert sorted(fed(loader)) == sorted(expected)
    assert fed(bf.Loader(again.map(number_of), 7, tail="uneven", chunk_bytes=chunk)) == expected


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_ranks_share_one_order_and_go_on_as_others(joined: bf.MapDataset, world_size: int) -> None:
    mapped = joined.map(number_of)
    whole = fed(bf.Loader(mapped, 30, shuffle=True, seed=5))
    assert sorted(whole) == sorted(ALL)
    first, state = fed_to_ranks(mapped, world_size, shuffle=True, seed=5, batches=3)
    second, _ = fed_to_ranks(mapped, 3, state, shuffle=True, seed=5)
    assert first + second == whole


def test_each_part_is_decoded_by_its_own_function_and_then_mapped(raw: bf.MapDataset, lines: bf.MapDataset) -> None:
    joined = bf.concat([raw.map(lambda s: number_of(s) * 2), lines.map(number_of)]).map(lambda number: (number,))
    assert list(joined) == [(number * 2,) for number in RAW] + [(number,) for number in LINES_IN_ORDER]
    assert list(pickle.loads(pickle.dumps(joined))) == list(joined)
    assert len(pickle.dumps(joined)) < 10_000


def test_workers_and_the_stock_dataloader_give_the_same(joined: bf.MapDataset) -> None:
    mapped = joined.map(number_of)
    with bf.Loader(mapped, 12, shuffle=True, seed=1, num_workers=2) as loader:
        assert fed(loader) == fed(bf.Loader(mapped, 12, shuffle=True, seed=1))
    stock = DataLoader(mapped, 60, num_workers=1, multiprocessing_context="forkserver")
    assert [number for batch in stock for number in batch.tolist()] == ALL


def test_errors_name_the_parts_object_and_line(raw: bf.MapDataset, tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_text('{"number": 7}\nno\n')
    bad = bf.open_dataset(tmp_path, cache=None)
    with pytest.raises(FormatError, match=r"b\.jsonl.*\(line 2 of the object\)"):
        bf.concat([raw, bad])[31]
    failing = bf.concat([raw, bad.take(1).map(lambda sample: 1 // 0)])
    with pytest.raises(DecodeError, match=r"number 0, .*b\.jsonl \[0:13\], fields number\): ZeroDivisionError"):
        failing[30]
    with pytest.raises(DecodeError, match=r"number 30, .*b\.jsonl \[0:13\]"):
        bf.concat([raw, bad.take(1)]).map(lambda sample: sample["number"] // 0)[30]


def test_samples_are_left_out_where_all_parts_say_so(raw: bf.MapDataset, tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_text('{"number": 7}\nno\n{"number": 9}\n')
    skipping = bf.open_dataset(tmp_path, cache=None, on_error="skip", max_errors=2)
    assert numbers(bf.concat([skipping, skipping]).__getitems__(range(6))) == [7, 9, 7, 9]
    assert bf.concat([skipping, skipping]).max_errors == 4
    with pytest.raises(ConfigError, match="on_error='skip', or none"):
        bf.concat([raw, skipping])


def test_what_no_data_set_is_made_of_is_named(raw: bf.MapDataset) -> None:
    with pytest.raises(ConfigError, match="a list of data sets, not a single one"):
        bf.concat(raw)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="at least one"):
        bf.concat([])
    with pytest.raises(ConfigError, match="not list"):
        bf.concat([raw, [1, 2]])  # type: ignore[list-item]


def test_a_part_may_be_empty_and_objects_may_come_twice(raw: bf.MapDataset, tars: bf.MapDataset) -> None:
    joined = bf.concat([raw.take(0), tars.take(2), raw.take(0), tars.take(1), raw.take(0)])
    assert numbers(joined) == [1000, 1001, 1000]
    assert len(bf.concat([raw.take(0)])) == 0


def shards_of(ds: bf.MapDataset) -> list[int]:
    return ds.index.locate(np.arange(len(ds)))[0].tolist()


def test_the_manifest_has_the_objects_of_all_parts(
    joined: bf.MapDataset, raw: bf.MapDataset, lines: bf.MapDataset
) -> None:
    manifest = joined.manifest
    assert len(manifest) == 30 + 5 + 2
    assert [manifest.key(0), manifest.key(30), manifest.key(36)] == ["00000.bin", "01000.tar", "1.jsonl"]
    assert manifest.object_url(36) == lines.manifest.object_url(1)
    assert [manifest.find(url) for url in manifest] == list(range(37))
    assert manifest.total_bytes == int(manifest.sizes.sum())
    assert manifest.range(0) == raw.manifest.range(0)
    with pytest.raises(KeyError):
        manifest.find("memory://elsewhere")
    shards = shards_of(joined)
    assert np.bincount(shards).tolist() == [1] * 30 + [20] * 5 + [25] * 2
    train, test = joined.split(0.8, 1, by="shard")
    assert set(shards_of(train)) | set(shards_of(test)) == set(shards)
    assert not set(shards_of(train)) & set(shards_of(test))


def test_each_part_goes_through_its_own_cache(raw: bf.MapDataset, folder: Path, tmp_path: Path) -> None:
    dataset = bf.open_dataset(folder / "tars", cache=bf.DiskCache(tmp_path / "cache", "100MB"))
    reader = RecordingReader(dataset.reader.inner)  # type: ignore[attr-defined]
    cached = dataset._with(reader=bf.CachedReader(reader, bf.DiskCache(tmp_path / "cold", "100MB")))
    joined = bf.concat([raw, cached, cached.take(40)]).map(number_of)
    for _ in range(2):
        assert sorted(fed(bf.Loader(joined, 10, shuffle=True))) == sorted([*RAW, *TARS, *TARS[:40]])
    asked = [range for call in reader.calls for range in call if range.length > 4096]
    assert len(asked) == len(set(asked)) == 5
    assert joined.stats().bytes_fetched > 0


class Far(RecordingReader):
    is_local = False


def test_workers_share_files_for_the_parts_that_need_them(
    raw: bf.MapDataset, tars: bf.MapDataset, folder: Path
) -> None:
    far = bf.open_dataset(folder / "tars", cache=None)
    far = far._with(reader=Far(far.reader))
    shared = bf.concat([raw, far, far.take(30), tars]).with_shared_files(1 << 20)
    assert [isinstance(reader, bf.CachedReader) for reader in shared.reader.readers] == [False, True, True, True]
    assert shared.reader.readers[1] is shared.reader.readers[2]
    assert shared.reader.readers[3] is tars.reader
    with bf.Loader(bf.concat([raw, far]).map(number_of), 13, shuffle=True, num_workers=2) as loader:
        assert sorted(fed(loader)) == [*RAW, *TARS]


def test_one_cache_of_several_parts_is_told_of_epochs(raw: bf.MapDataset, tars: bf.MapDataset, folder: Path) -> None:
    assert bf.concat([raw, tars, tars.take(3)]).cache is tars.cache
    other = tars._with(reader=bf.CachedReader(raw.reader, bf.DiskCache(folder.parent / "other", "10MB")))
    assert bf.concat([tars, other]).cache is None


def test_decode_functions_of_parts_run_in_as_many_threads(raw: bf.MapDataset, tars: bf.MapDataset) -> None:
    assert bf.concat([raw, tars]).decode is None
    assert bf.concat([raw, tars.map(number_of)]).decode is not None


def test_the_state_of_other_parts_is_refused(raw: bf.MapDataset, lines: bf.MapDataset) -> None:
    state = bf.Loader(bf.concat([raw, lines]), 10).state_dict()
    bf.Loader(bf.concat([raw, lines]), 10).load_state_dict(state)
    with pytest.raises(ResumeError, match="fingerprint"):
        bf.Loader(bf.concat([lines, raw]), 10).load_state_dict(state)
