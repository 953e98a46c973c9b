from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from bucketfeed.errors import ConfigError
from bucketfeed.sampling.division import Division
from bucketfeed.sampling.order import Order
from bucketfeed.sampling.topology import Topology

TAILS = ["drop", "pad", "uneven"]
sizes = st.integers(1, 9)


def world(size: int, n: int, batch: int, tail: str, start: int = 0) -> list[Division]:
    return [Division(n, batch, Topology(rank, size), tail, start=start) for rank in range(size)]


def taken(divisions: list[Division]) -> list[int]:
    return [p for d in divisions for b in range(len(d)) for p in d.positions(b).tolist()]


def possible(n: int, batch: int, ranks: int, tail: str) -> bool:
    return n >= batch * ranks if tail == "drop" else tail == "uneven" or n > 0


@pytest.mark.parametrize("tail", TAILS)
def test_ranks_divide_every_epoch_up_to_60_samples(tail):
    for n in range(61):
        for ranks in (1, 2, 3, 4, 8):
            for batch in (1, 2, 5):
                if not possible(n, batch, ranks, tail):
                    continue
                divisions = world(ranks, n, batch, tail)
                step = ranks * batch
                if tail == "drop":
                    assert sorted(taken(divisions)) == list(range(n // step * step))
                elif tail == "uneven":
                    assert sorted(taken(divisions)) == list(range(n))
                else:
                    counts = Counter(taken(divisions))
                    assert set(counts) == set(range(n))
                    padded = sum(d.padded(b) for d in divisions for b in range(len(d)))
                    assert counts.total() - padded == n
                    assert padded == -n % step
                if tail != "uneven":
                    assert len({len(d) for d in divisions}) == 1
                    assert all(len(d.positions(b)) == batch for d in divisions for b in range(len(d)))


@given(st.integers(0, 200), sizes, sizes, sizes, sizes, st.sampled_from(TAILS), st.data())
def test_a_run_cut_anywhere_and_resumed_on_another_world_takes_what_is_left(n, w1, b1, w2, b2, tail, data):
    assume(possible(n, b1, w1, tail) and possible(n, b2, w2, tail))
    before = world(w1, n, b1, tail)
    common = min(len(d) for d in before)
    cut = data.draw(st.integers(0, common))
    start = before[0].consumed(cut - 1) if cut else 0
    after = world(w2, n, b2, tail, start=start)
    first = [
        p for d in before for b in range(cut) for p in d.positions(b)[: len(d.positions(b)) - d.padded(b)].tolist()
    ]
    rest = [
        p for d in after for b in range(len(d)) for p in d.positions(b)[: len(d.positions(b)) - d.padded(b)].tolist()
    ]
    end = n if tail != "drop" else start + (n - start) // (w2 * b2) * w2 * b2
    assert sorted(first + rest) == list(range(end))


@given(st.integers(1, 200), sizes, sizes, st.sampled_from(TAILS))
def test_repeats_stand_at_the_end_of_their_batch_and_come_from_the_epochs_beginning(n, ranks, batch, tail):
    assume(possible(n, batch, ranks, tail))
    for rank, division in enumerate(world(ranks, n, batch, tail)):
        for b in range(len(division)):
            raw = (b * batch + np.arange(batch)) * ranks + rank
            assert division.padded(b) == ((raw >= n).sum() if tail == "pad" else 0)
            wrapped = raw % n if tail == "pad" else raw[raw < n]
            assert division.positions(b).tolist() == wrapped.tolist()


@given(st.integers(1, 200), sizes, sizes, st.sampled_from(TAILS))
def test_what_is_consumed_agrees_on_all_ranks_and_ends_at_the_epochs_end(n, ranks, batch, tail):
    assume(possible(n, batch, ranks, tail))
    divisions = world(ranks, n, batch, tail)
    for b in range(min(len(d) for d in divisions)):
        assert {d.consumed(b) for d in divisions} == {min(n, (b + 1) * batch * ranks)}
    if tail != "drop":
        assert max(d.consumed(len(d) - 1) for d in divisions if len(d)) == n


@pytest.mark.parametrize("tail", ["drop", "pad"])
def test_c047_two_ranks_have_the_same_number_of_batches_of_21_samples(tail):
    # Three shards of 5, 7 and 9 samples, batch 2: 5 whole global batches of 4, and one sample left.
    order = Order(np.array([5, 7, 9]), seed=0)
    divisions = world(2, len(order), 2, tail)
    assert [len(d) for d in divisions] == ([5, 5] if tail == "drop" else [6, 6])
    samples = order.samples(np.array(taken(divisions)))
    if tail == "drop":
        assert len(set(samples.tolist())) == len(samples) == 20
    else:
        assert set(samples.tolist()) == set(range(21))
        assert [d.padded(5) for d in divisions] == [1, 2]


@pytest.mark.parametrize("ranks", [2, 4])
def test_c049_in_evaluation_each_of_21_samples_comes_once(ranks):
    assert sorted(taken(world(ranks, 21, 2, "uneven"))) == list(range(21))


@pytest.mark.parametrize("ranks", [2, 4])
def test_c049_in_training_repeats_are_told(ranks):
    divisions = world(ranks, 21, 2, "pad")
    repeats = sum(d.padded(b) for d in divisions for b in range(len(d)))
    assert repeats == len(taken(divisions)) - 21 == 3


def test_c054_a_resume_leaves_later_epochs_whole():
    assert len(taken(world(1, 128, 1, "drop", start=122))) == 6
    assert len(taken(world(1, 128, 1, "drop"))) == 128


def test_more_ranks_than_samples_pads_or_leaves_some_without():
    assert [d.positions(0).tolist() for d in world(5, 2, 1, "pad")] == [[0], [1], [0], [1], [0]]
    assert [d.padded(0) for d in world(5, 2, 1, "pad")] == [0, 0, 1, 1, 1]
    assert [len(d) for d in world(5, 2, 1, "uneven")] == [1, 1, 0, 0, 0]


def test_a_batch_larger_than_the_data_set_names_both_numbers_and_the_way_out():
    with pytest.raises(ConfigError, match=r"64 samples on each of 2 ranks takes 128 .* has 100: .*tail='uneven'"):
        Division(100, 64, Topology(0, 2))
    with pytest.raises(ConfigError, match="empty"):
        Division(0, 4, Topology(), "pad")
    assert len(Division(0, 4, Topology(), "uneven")) == 0
    assert len(Division(100, 50, Topology(0, 2), "drop", start=100)) == 0  # a resume at the end is no fault


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"tail": "keep"}, "tail"),
        ({"batch_size": 0}, "batch_size"),
        ({"batch_size": 2.0}, "batch_size"),
        ({"batch_size": True}, "batch_size"),
        ({"start": 11}, "start"),
        ({"start": -1}, "start"),
        ({"length": -1}, "length"),
    ],
    ids=str,
)
def test_what_divides_nothing_is_refused_by_name(change, name):
    with pytest.raises(ConfigError, match=name):
        Division(**{"length": 10, "batch_size": 2, "topology": Topology(), **change})


def test_batches_that_are_not_there_are_refused():
    division = Division(10, 2, Topology())
    for batch in (-1, 5):
        with pytest.raises(IndexError, match="of 5"):
            division.positions(batch)
