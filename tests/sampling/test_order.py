from __future__ import annotations

import pickle
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bucketfeed.errors import ConfigError
from bucketfeed.sampling.order import Order

STREAMS = [1, 2, 3, 7, 16, 64]
tables = st.one_of(st.integers(0, 300), st.lists(st.integers(1, 40), max_size=40).map(lambda c: np.array(c, np.int64)))
orders = st.builds(
    lambda counts, seed, epoch, streams, shuffle: Order(
        counts, seed=seed, epoch=epoch, streams=streams, shuffle=shuffle
    ),
    tables,
    st.integers(0, 2**64 - 1),
    st.integers(0, 5),
    st.integers(1, 70),
    st.booleans(),
)


def everything(order: Order) -> np.ndarray:
    return order.samples(np.arange(len(order)))


def written(order: Order) -> str:
    return " ".join(map(str, everything(order)))


def chunk_of(counts: np.ndarray | int, samples: np.ndarray) -> np.ndarray:
    if isinstance(counts, int):
        return samples
    return np.repeat(np.arange(len(counts)), counts)[samples]


def test_golden_orders_never_change_between_versions():
    table = np.array([3, 1, 4, 1, 5, 2])
    assert written(Order(10, seed=1)) == "5 2 6 3 1 0 9 4 7 8"
    assert written(Order(12, seed=17, epoch=3, streams=5)) == "8 9 5 3 4 6 10 7 2 0 1 11"
    assert written(Order(table, seed=7, streams=2)) == "3 11 4 9 7 8 6 2 5 0 13 1 10 14 12 15"
    assert written(Order(table, seed=7, epoch=1, streams=5)) == "5 7 3 12 8 6 14 10 9 2 4 15 13 11 0 1"
    assert written(Order(table, seed=2**64 - 1, epoch=1, streams=1)) == "14 15 0 2 1 12 11 10 9 13 8 3 5 7 6 4"
    assert Order(10**12, seed=5).samples(np.array([0, 1, 10**12 - 1])).tolist() == [
        928078587564,
        563160743922,
        365237684531,
    ]


def test_golden_hashes_never_change_between_versions():
    assert Order(10, seed=1).hash() == "75e8720bdf0358b1"
    assert Order(np.array([3, 1, 4, 1, 5, 2]), seed=7, streams=2).hash() == "2814604564c5df0a"
    assert Order(1_000_000, seed=7).hash() == "a7a09b26ac81d04a"


@pytest.mark.parametrize("streams", STREAMS)
def test_every_number_of_samples_up_to_200_is_covered_once(streams):
    for n in range(201):
        for counts in (n, np.ones(n, np.int64), np.array([5] * (n // 5) + [n % 5] * (n % 5 > 0), np.int64)):
            assert np.array_equal(np.sort(everything(Order(counts, seed=n, streams=streams))), np.arange(n))


@given(orders)
def test_every_sample_has_one_position(order):
    assert np.array_equal(np.sort(everything(order)), np.arange(len(order)))


@given(orders, st.data())
def test_any_positions_in_any_sequence_give_what_the_whole_order_has_there(order, data):
    if len(order):
        positions = np.array(data.draw(st.lists(st.integers(0, len(order) - 1), max_size=50)), np.int64)
        assert np.array_equal(order.samples(positions), everything(order)[positions])


@given(tables, st.integers(0, 2**32), st.integers(1, 70))
def test_the_order_is_the_formula_of_the_design(counts, seed, streams):
    order = Order(counts, seed=seed, streams=streams)
    got = chunk_of(counts, everything(order)).tolist()
    run = len(order) // streams
    # Each stream reads a contiguous run of one row, in which every chunk is whole.
    places = [s * run + g for g in range(run) for s in range(streams)] + list(range(run * streams, len(order)))
    row = [chunk for _, chunk in sorted(zip(places, got, strict=True))]
    borders = [i for i in range(1, len(row)) if row[i] != row[i - 1]]
    assert len(borders) == max(0, len(set(row)) - 1)


@given(orders)
@settings(max_examples=200)
def test_a_lease_ends_where_its_stream_reads_its_chunk_for_the_last_time(order):
    n = len(order)
    positions = np.arange(n)
    chunks, streams, last = order.leases(positions)
    assert np.array_equal(chunks, chunk_of(n if order._counts is None else order._counts, order.samples(positions)))
    assert ((streams >= 0) & (streams < order.streams)).all()
    true: dict[tuple[int, int], int] = {}
    for position, lease in enumerate(zip(chunks.tolist(), streams.tolist(), strict=True)):
        true[lease] = position
    assert last.tolist() == [true[lease] for lease in zip(chunks.tolist(), streams.tolist(), strict=True)]


def test_a_chunk_cut_by_the_border_of_two_streams_is_leased_to_each():
    chunks, streams, last = Order(np.array([11]), streams=2).leases(np.arange(11))
    assert set(chunks.tolist()) == {0}
    assert streams.tolist() == [0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 1]  # the left-over goes to the last stream
    assert last.tolist() == [8, 10, 8, 10, 8, 10, 8, 10, 8, 10, 10]


def test_no_more_chunks_are_open_than_streams_and_few_are_opened_in_one_batch():
    counts = np.full(2_000, 40)
    order = Order(counts, seed=3, streams=16)
    chunks, streams, last = order.leases(np.arange(len(order)))
    leases = {(c, s): end for c, s, end in zip(chunks.tolist(), streams.tolist(), last.tolist(), strict=True)}
    first: dict[tuple[int, int], int] = {}
    for position, lease in enumerate(zip(chunks.tolist(), streams.tolist(), strict=True)):
        first.setdefault(lease, position)
    change = np.zeros(len(order) + 1, int)
    for lease, end in leases.items():
        change[first[lease]] += 1
        change[end + 1] -= 1
    assert change.cumsum().max() <= 16
    assert len(leases) <= 2_000 + 15


def test_a_rank_owns_whole_streams_where_the_world_divides_them():
    order = Order(np.full(100, 7), streams=16)
    _, streams, _ = order.leases(np.arange(700 // 16 * 16))
    for rank in range(4):
        assert set(streams[rank::4].tolist()) == set(range(rank, 16, 4))


def test_without_shuffle_samples_come_as_they_lie():
    order = Order(np.array([3, 4, 2]), seed=9, streams=16, shuffle=False)
    assert everything(order).tolist() == list(range(9))
    assert order.leases(np.arange(9))[2].tolist() == [2, 2, 2, 6, 6, 6, 6, 8, 8]


def test_positions_outside_the_epoch_are_refused():
    for position in (-1, 10):
        with pytest.raises(IndexError, match="order of 10 samples"):
            Order(10).samples(np.array([position]))
    assert Order(0).samples(np.arange(0)).tolist() == []
    assert [part.tolist() for part in Order(np.array([], np.int64)).leases(np.arange(0))] == [[], [], []]


def test_epochs_and_seeds_are_as_unlike_as_chance():
    n = 10_000
    rows = [everything(Order(n, seed=s, epoch=e)) for s, e in ((0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0))]
    for i, a in enumerate(rows):
        for b in rows[:i]:
            assert (a == b).sum() < 10
            assert abs(np.corrcoef(a, b)[0, 1]) < 0.05


@pytest.mark.parametrize("counts", [6, np.array([2, 2, 2]), np.array([3, 3])], ids=str)
def test_each_sample_is_equally_likely_at_each_position(counts):
    seeds = 1_500
    rows = np.stack([everything(Order(counts, seed=seed, streams=2)) for seed in range(seeds)])
    seen = np.stack([np.bincount(rows[:, i], minlength=6) for i in range(6)])
    assert np.abs(seen - seeds / 6).max() < 5 * np.sqrt(seeds / 6)


def test_the_hash_tells_orders_apart_and_equal_ones_agree():
    table = np.array([3, 1, 4, 1, 5, 2])
    hashes = {
        Order(counts, seed=seed, epoch=epoch, streams=streams, shuffle=shuffle).hash()
        for counts in (16, table, table[::-1])
        for seed in (0, 1)
        for epoch in (0, 1)
        for streams in (1, 2)
        for shuffle in (True, False)
    }
    assert len(hashes) == 3 * 2 * 2 * 3  # without shuffle there are no streams
    assert Order(table.astype(np.uint8), seed=np.int64(1)).hash() == Order(table, seed=1).hash()
    assert pickle.loads(pickle.dumps(Order(table, seed=1))).hash() == Order(table, seed=1).hash()


def test_many_samples_of_their_own_cost_no_memory():
    tracemalloc.start()
    order = Order(10**13, seed=1)
    order.samples(np.arange(64))
    order.leases(np.arange(64))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 200_000
    assert len(pickle.dumps(order)) < 1_000


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"counts": -1}, "counts"),
        ({"counts": 1.5}, "counts"),
        ({"counts": True}, "counts"),
        ({"counts": 2**54}, "counts"),
        ({"counts": np.array([3, 0, 2])}, "counts"),
        ({"counts": np.array([1.0])}, "counts"),
        ({"counts": np.ones((2, 2), int)}, "counts"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"seed": "1"}, "seed"),
        ({"epoch": -1}, "epoch"),
        ({"streams": 0}, "streams"),
        ({"streams": 1.0}, "streams"),
    ],
    ids=str,
)
def test_what_makes_no_order_is_refused_by_name(arguments, name):
    with pytest.raises(ConfigError, match=name):
        Order(**{"counts": 10, **arguments})


def test_numpy_integers_serve_as_well():
    assert np.array_equal(everything(Order(np.int32(10), seed=np.uint64(1))), everything(Order(10, seed=1)))


def test_the_repr_tells_the_order():
    assert repr(Order(np.array([3, 4]), seed=5, epoch=2)) == (
        "Order(7 samples in 2 chunks, seed=5, epoch=2, streams=16)"
    )
    assert repr(Order(7, shuffle=False)) == "Order(7 samples in 7 chunks, shuffle=False)"
