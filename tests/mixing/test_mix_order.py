"""The arithmetic of a mix: exact shares at every point, every sample once a pass, places of draws found back."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bucketfeed.sampling.mix import Mix, MixOrder, Schedule, length_of
from bucketfeed.sampling.order import Order

WEIGHTS = st.lists(st.integers(1, 1000), min_size=1, max_size=7)
SEEDS = st.integers(0, 2**32)


def shares_of(weights: list[int]) -> tuple[Fraction, ...]:
    return tuple(Fraction(weight, sum(weights)) for weight in weights)


def drawn_of(shares: tuple[Fraction, ...], sizes: tuple[int, ...], positions: int) -> list[int]:
    drawn = Mix(shares, sizes, 1).drawn(positions)
    return [drawn[source] for source in range(len(sizes))]


def fibonacci_bound(sources: int) -> float:
    """How far counts may be from exact shares: 1.5 on each level of a Huffman tree, whose weights at least add up."""
    path, a, b = [1.0], 1, 2
    for _ in range(sources - 2):
        path.append(1 / a)
        a, b = b, a + b
    return 1.5 * sum(path)


@settings(deadline=None)
@given(WEIGHTS, st.integers(1, 700), st.integers(0, 50), st.none() | SEEDS)
def test_counts_keep_to_their_shares_at_every_point_of_a_run(
    weights: list[int], length: int, epoch: int, seed: int | None
) -> None:
    shares = shares_of(weights)
    mix = Mix(shares, (10,) * len(weights), length)
    schedule = Schedule(mix, epoch, seed)
    sources, draws = schedule.draws(np.arange(length))
    done = np.arange(epoch * length, (epoch + 1) * length) + 1
    for source, share in enumerate(shares):
        mine = sources == source
        assert draws[mine].tolist() == list(range(schedule.counts[source]))
        off = schedule.before[source] + np.cumsum(mine) - done * float(share)
        assert np.abs(off).max() <= fibonacci_bound(len(weights)) + 1e-6
        assert schedule.positions(source, draws[mine]).tolist() == np.flatnonzero(mine).tolist()
        assert Schedule(mix, epoch + 1, seed).before[source] == schedule.before[source] + mine.sum()


@pytest.mark.parametrize("weights", [[1, 1], [3, 1], [99, 1], [1, 1, 1], [70, 20, 10], [5, 4, 3, 2, 1], [1] * 8])
@pytest.mark.parametrize("seed", [None, 7])
def test_usual_weights_are_never_off_by_more_than_two(weights: list[int], seed: int | None) -> None:
    shares = shares_of(weights)
    for epoch in range(3):
        schedule = Schedule(Mix(shares, (1000,) * len(weights), 5000), epoch, seed)
        sources, _ = schedule.draws(np.arange(5000))
        for source, share in enumerate(shares):
            off = np.cumsum(sources == source) - np.arange(1, 5001) * float(share)
            assert np.abs(off).max() <= 2 + 1e-6


def test_a_billion_positions_in_counts_are_exact() -> None:
    shares = shares_of([70, 20, 10])
    schedule = Schedule(Mix(shares, (10**9,) * 3, 2**31), 10**6, 3)
    positions = np.array([0, 1, 12345678, 2**31 - 1])
    sources, draws = schedule.draws(positions)
    for source, draw, position in zip(sources.tolist(), draws, positions.tolist(), strict=True):
        assert schedule.positions(source, np.array([draw])).tolist() == [position]
    for source, share in enumerate(shares):
        assert abs(schedule.before[source] - 10**6 * 2**31 * share) < 2


@pytest.mark.parametrize("world_size", [2, 4, 8, 64])
@pytest.mark.parametrize("weights", [[1, 1], [3, 1], [1, 1, 1, 1], [501, 499]])
def test_every_rank_meets_every_source(weights: list[int], world_size: int) -> None:
    shares = shares_of(weights)
    sources, _ = Schedule(Mix(shares, (10,) * len(weights), 64 * 400), 0, 1).draws(np.arange(64 * 400))
    for rank in range(world_size):
        seen = np.bincount(sources[rank::world_size], minlength=len(weights)) / (64 * 400 / world_size)
        assert np.abs(seen - np.array(shares, float)).max() < 0.15


COUNTS = st.lists(st.integers(1, 8), min_size=1, max_size=6) | st.integers(1, 40)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(COUNTS, st.integers(1, 20)), min_size=1, max_size=4),
    st.integers(1, 120),
    st.integers(1, 20),
    SEEDS,
)
def test_every_sample_of_a_source_comes_once_a_pass_in_its_own_order(
    sources: list[tuple[list[int] | int, int]], length: int, streams: int, seed: int
) -> None:
    counts = [count if isinstance(count, int) else np.array(count) for count, _ in sources]
    sizes = tuple(int(np.sum(count)) for count in counts)
    total = sum(sizes)
    mix = Mix(shares_of([weight for _, weight in sources]), sizes, length)
    drawn: list[list[int]] = [[] for _ in sources]
    for epoch in range(4):
        order = MixOrder(mix, counts, seed=seed, epoch=epoch, streams=streams)
        samples = order.samples(np.arange(length))
        assert len(set(samples.tolist())) == length
        starts = np.cumsum([0, *sizes])
        for sample in samples % total:
            source = int(np.searchsorted(starts, sample, side="right")) - 1
            drawn[source].append(int(sample - starts[source]))
    for own, size in zip(drawn, sizes, strict=True):
        for at in range(0, len(own), size):
            one = own[at : at + size]
            assert len(set(one)) == len(one)
    first = Order(counts[0], seed=order._seeds[0], streams=order._streams[0]).samples(np.arange(sizes[0]))
    assert drawn[0][: sizes[0]] == first.tolist()[: len(drawn[0])]


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(COUNTS, st.integers(1, 20)), min_size=1, max_size=4),
    st.integers(1, 120),
    st.integers(1, 20),
    st.booleans(),
)
def test_leases_tell_the_chunk_and_how_long_its_stream_wants_it(
    sources: list[tuple[list[int] | int, int]], length: int, streams: int, shuffle: bool
) -> None:
    counts = [count if isinstance(count, int) else np.array(count) for count, _ in sources]
    sizes = tuple(int(np.sum(count)) for count in counts)
    flat = np.concatenate([np.ones(count, int) if isinstance(count, int) else count for count in counts])
    mix = Mix(shares_of([weight for _, weight in sources]), sizes, length)
    order = MixOrder(mix, counts, seed=1, epoch=2, streams=streams, shuffle=shuffle)
    positions = np.arange(length)
    chunks, lanes, last = order.leases(positions)
    chunk_of = np.repeat(np.arange(len(flat)), flat)
    assert chunks.tolist() == chunk_of[order.samples(positions) % sum(sizes)].tolist()
    until: dict[tuple[int, int], int] = {}
    for key in zip(chunks.tolist(), lanes.tolist(), positions.tolist(), strict=True):
        until[key[:2]] = key[2]
    for chunk, lane, position in zip(chunks.tolist(), lanes.tolist(), last.tolist(), strict=True):
        assert until[chunk, lane] <= position < length
        assert position in (until[chunk, lane], length - 1)


@given(st.lists(st.tuples(st.integers(1, 100), st.integers(1, 50)), min_size=1, max_size=5))
def test_an_epoch_ends_with_its_first_or_its_last_source(sources: list[tuple[int, int]]) -> None:
    sizes = tuple(size for size, _ in sources)
    shares = shares_of([weight for _, weight in sources])
    first, last = (length_of(shares, sizes, stop) for stop in ("first", "all"))
    assert all(count <= size for count, size in zip(drawn_of(shares, sizes, first), sizes, strict=True))
    assert all(count >= size for count, size in zip(drawn_of(shares, sizes, last), sizes, strict=True))
    assert first <= last
    limits = [size / share for size, share in zip(sizes, shares, strict=True)]
    rounding = 2 * len(sizes) / min(shares)
    assert min(limits) - rounding <= first <= min(limits)
    assert max(limits) <= last <= max(limits) + rounding


def test_positions_outside_are_refused() -> None:
    order = MixOrder(Mix(shares_of([1, 1]), (5, 5), 10), [5, 5])
    with pytest.raises(IndexError, match="positions 3 to 10 of an order of 10 samples"):
        order.samples(np.array([3, 10]))
