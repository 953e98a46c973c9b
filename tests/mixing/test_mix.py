"""Mixes as data sets: the same samples in the same order on any ranks and workers, resumed in the middle."""

from __future__ import annotations

import pickle
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from sources import LINES, RAW, TARS, fed, fed_to_ranks, number_of, numbers, source_of
from torch.utils.data import DataLoader, RandomSampler

import bucketfeed as bf
from bucketfeed.errors import ConfigError, ResumeError
from bucketfeed.testing.readers import RecordingReader


@pytest.fixture
def mixed(raw: bf.MapDataset, tars: bf.MapDataset, lines: bf.MapDataset) -> bf.MapDataset:
    """Raw objects come about six times, tars and lines less than once and a half."""
    sources = [source.map(number_of) for source in (raw, tars, lines)]
    return bf.mix(sources, weights=[0.5, 0.3, 0.2], stop="all")


def counts_of(given: list[int]) -> list[int]:
    found = Counter(map(source_of, given))
    return [found[source] for source in range(3)]


def test_a_mix_by_number_is_its_sources_in_their_own_order(mixed: bf.MapDataset) -> None:
    given = list(mixed)
    assert len(mixed) == len(given) == 334
    assert counts_of(given) == [167, 100, 67]
    assert counts_of(given[:10]) == [5, 3, 2]
    assert [number for number in given if number < 1000] == ([*RAW] * 6)[:167]
    assert [number for number in given if 1000 <= number < 2000] == [*TARS]
    assert fed(bf.Loader(mixed, 9, tail="uneven")) == given
    assert [number for batch in DataLoader(mixed, 9) for number in batch.tolist()] == given
    sampler = RandomSampler(mixed, generator=torch.Generator().manual_seed(0))
    assert sorted(n for batch in DataLoader(mixed, 9, sampler=sampler) for n in batch.tolist()) == sorted(given)


def test_every_source_is_gone_through_whole_before_it_comes_again(mixed: bf.MapDataset) -> None:
    loader = bf.Loader(mixed, 37, shuffle=True, seed=3, tail="uneven")
    run = [number for _ in range(5) for number in fed(loader)]
    assert len(run) == 5 * 334
    for source, own in enumerate((RAW, TARS, LINES)):
        drawn = [number for number in run if source_of(number) == source]
        passes = [drawn[at : at + len(own)] for at in range(0, len(drawn) - len(own), len(own))]
        assert len(passes) >= 4
        for one in passes:
            assert sorted(one) == [*own]
        assert len(set(map(tuple, passes))) == len(passes)
    for n in range(1, len(run), 7):
        for count, share in zip(counts_of(run[:n]), (0.5, 0.3, 0.2), strict=True):
            assert abs(count - n * share) <= 2


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("shuffle", [True, False])
def test_ranks_share_one_order_and_go_on_as_others(mixed: bf.MapDataset, world_size: int, shuffle: bool) -> None:
    whole = fed(bf.Loader(mixed, 30, shuffle=shuffle, seed=5, tail="uneven"))
    first, state = fed_to_ranks(mixed, world_size, shuffle=shuffle, seed=5, batches=4)
    assert len(first) == 120
    second, _ = fed_to_ranks(mixed, 2, state, shuffle=shuffle, seed=5)
    assert first + second == whole


def test_workers_give_what_threads_give_also_after_a_resume(mixed: bf.MapDataset) -> None:
    expected = bf.Loader(mixed, 37, shuffle=True, seed=4)
    epochs = [fed(expected) for _ in range(2)]
    with bf.Loader(mixed, 37, shuffle=True, seed=4, num_workers=2) as loader:
        assert [fed(loader) for _ in range(2)] == epochs
        loader.load_state_dict({**loader.state_dict(), "epoch": 1, "position": 74})
        assert fed(loader) == epochs[1][74:]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_the_stock_dataloader_reads_a_mix_under_every_start_method(mixed: bf.MapDataset, method: str) -> None:
    stock = DataLoader(mixed, 100, num_workers=1, multiprocessing_context=method)
    assert [number for batch in stock for number in batch.tolist()] == list(mixed)


def test_a_mix_pickles_small_and_is_mapped(mixed: bf.MapDataset) -> None:
    mapped = mixed.map(lambda number: -number)
    assert len(pickle.dumps(mapped)) < 12_000
    again = pickle.loads(pickle.dumps(mapped))
    assert list(again) == [-number for number in mixed]
    assert repr(again).startswith("MixDataset(")
    assert "shares=[0.5, 0.3, 0.2], samples=334" in repr(again)


def test_random_numbers_differ_from_pass_to_pass_of_one_epoch(raw: bf.MapDataset, lines: bf.MapDataset) -> None:
    drawn = bf.mix([raw.take(2), lines], [1, 1], stop="all").map(lambda sample: (number_of(sample), bf.rng().random()))
    loader = bf.Loader(drawn, 10, shuffle=True, collate=list)
    given = [pair for batch in loader for pair in batch]
    assert len(set(given)) == len(given) == 100
    assert given == [pair for batch in bf.Loader(drawn, 20, shuffle=True, collate=list) for pair in batch]


def test_lengths(raw: bf.MapDataset, tars: bf.MapDataset) -> None:
    both = [raw, tars]
    assert len(bf.mix(both, [1, 1])) == 60
    assert len(bf.mix(both, [1, 1], stop="all")) == 200
    assert len(bf.mix(both, [0.3, 0.7])) == 100
    assert len(bf.mix(both, [1, 1], length=10_000)) == 10_000
    assert len(bf.mix([raw], [7])) == 30
    assert sorted(numbers(bf.mix([raw], [7]))) == [*RAW]


def test_by_size_of_sources_each_comes_once(raw: bf.MapDataset, tars: bf.MapDataset) -> None:
    both = bf.mix([raw, tars], [len(raw), len(tars)]).map(number_of)
    assert len(both) == 130
    loader = bf.Loader(both, 13, shuffle=True)
    for _ in range(3):
        assert sorted(fed(loader)) == [*RAW, *TARS]


def test_views_and_joined_data_sets_are_mixed_as_any(
    raw: bf.MapDataset, tars: bf.MapDataset, lines: bf.MapDataset
) -> None:
    thirds, rest = tars.select(slice(0, 90, 3)), bf.concat([raw, lines]).split(0.5, 2)[0]
    both = bf.mix([thirds.map(number_of), rest.map(number_of)], [1, 1], length=200)
    whole = sorted(number_of(sample) for sample in rest)
    loader = bf.Loader(both, 20, shuffle=True, chunk_bytes=2048, tail="uneven")
    run = [number for _ in range(3) for number in fed(loader)]
    for own, drawn in (
        (sorted(TARS[0:90:3]), [number for number in run if source_of(number) == 1]),
        (whole, [number for number in run if source_of(number) != 1]),
    ):
        assert len(drawn) == 300
        for at in range(0, 300 - len(own), len(own)):
            assert sorted(drawn[at : at + len(own)]) == own


def test_the_order_has_a_name(mixed: bf.MapDataset, raw: bf.MapDataset, tars: bf.MapDataset) -> None:
    assert bf.order_hash(mixed, 1, 2) == bf.order_hash(pickle.loads(pickle.dumps(mixed)), 1, 2)
    named = [
        bf.order_hash(bf.mix([raw, tars], weights, length=50), seed, epoch)
        for weights in ([1, 1], [1, 2])
        for seed in (0, 1)
        for epoch in (0, 1)
    ]
    assert len(set(named)) == 8


def test_the_state_of_other_shares_is_refused(raw: bf.MapDataset, tars: bf.MapDataset) -> None:
    def loader(weights: list[float], length: int = 100) -> bf.Loader:
        return bf.Loader(bf.mix([raw, tars], weights, length=length), 10, shuffle=True)

    state = loader([0.25, 0.75]).state_dict()
    loader([1, 3]).load_state_dict(state)
    for other in (loader([1, 2]), loader([1, 3], 200)):
        with pytest.raises(ResumeError, match="fingerprint"):
            other.load_state_dict(state)


def test_what_can_not_be_mixed_is_named(raw: bf.MapDataset, tars: bf.MapDataset) -> None:
    both = [raw, tars]
    with pytest.raises(ConfigError, match="one weight for each data set: 2, not 1"):
        bf.mix(both, [1])
    for weight in (0, -1, float("nan"), float("inf"), "half"):
        with pytest.raises(ConfigError, match="numbers above 0, not"):
            bf.mix(both, [1, weight])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match=r"data set 1 \(.*tars/\) has no samples"):
        bf.mix([raw, tars.take(0)], [1, 1])
    with pytest.raises(ConfigError, match="'first' or 'all', not 'longest'"):
        bf.mix(both, [1, 1], stop="longest")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="length of a mix must be a whole number from 1 to 2147483648, not 0"):
        bf.mix(both, [1, 1], length=0)
    with pytest.raises(ConfigError, match="from 1 to 2147483648"):
        bf.mix(both, [1, 10**12], stop="all")


def test_views_of_a_mix_are_refused_by_name(raw: bf.MapDataset, tars: bf.MapDataset) -> None:
    mixed = bf.mix([raw, tars], [1, 1])
    for what, call in {
        "select": lambda: mixed.select([1]),
        "split": lambda: mixed.split(0.5),
        "repeat": lambda: mixed.repeat(2),
        "mix": lambda: bf.mix([mixed, raw], [1, 1]),
        "concat": lambda: bf.concat([mixed, raw]),
    }.items():
        with pytest.raises(ConfigError, match=rf"{what} of a mix: .*mix\(\.\.\., length=n\)"):
            call()


def test_chunks_are_fetched_once_an_epoch_and_few_are_held(folder: Path, tmp_path: Path, raw: bf.MapDataset) -> None:
    dataset = bf.open_dataset(folder / "tars", cache=None)
    reader = RecordingReader(dataset.reader)
    remote = dataset._with(reader=bf.CachedReader(reader, bf.DiskCache(tmp_path / "cold", "100MB")))
    mixed = bf.mix([raw, remote], [3, 10]).map(number_of)
    loader = bf.Loader(mixed, 13, shuffle=True, streams=4, chunk_bytes=4096)
    assert len(loader._plan.chunks) == 30 + len(remote.chunks(4096))
    given = fed(loader)
    assert sorted(given) == [*RAW, *TARS]
    held = order_chunks(loader)
    assert held <= 6
    asked = [range for call in reader.calls for range in call if range.length > 2000]
    assert len(asked) == len(set(asked))


def order_chunks(loader: bf.Loader) -> int:
    """The most chunks that are wanted at the same time in the loader's first epoch."""
    positions = np.arange(len(loader.dataset))
    chunks, lanes, last = loader._plan.order(0).leases(positions)
    held: set[tuple[int, int, int]] = set()
    most = 0
    for position, chunk, lane, end in zip(positions, chunks, lanes, last, strict=True):
        held = {one for one in held if one[0] >= position} | {(int(end), int(chunk), int(lane))}
        most = max(most, len(held))
    return most
