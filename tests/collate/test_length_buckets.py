"""Length buckets: batches of about one length, the same for any number of ranks, and resumed in the middle."""

from __future__ import annotations

import io
import json
import pickle
import tarfile
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import bucketfeed as bf
from bucketfeed.data.buckets import BucketDivision
from bucketfeed.errors import ConfigError, ResumeError

SAMPLES = 230
LENGTHS = np.random.default_rng(5).integers(1, 400, SAMPLES)


def decode(sample: dict) -> dict:
    return {"n": int(sample["__key__"][-5:].removesuffix(".bin")), "x": np.frombuffer(sample["bin"], np.uint8)}


@pytest.fixture(scope="module")
def tars(tmp_path_factory: pytest.TempPathFactory) -> bf.MapDataset:
    folder = tmp_path_factory.mktemp("tars")
    for first in range(0, SAMPLES, 25):
        with tarfile.open(folder / f"{first:05}.tar", "w") as tar:
            for number in range(first, min(first + 25, SAMPLES)):
                member = tarfile.TarInfo(f"{number:05}.bin")
                member.size = int(LENGTHS[number])
                tar.addfile(member, io.BytesIO(bytes([number]) * member.size))
    return bf.open_dataset(folder, decode=decode, cache=None)


def numbers(samples: list[dict]) -> list[int]:
    return [sample["n"] for sample in samples]


def loader(ds: bf.MapDataset, rank: int = 0, world_size: int = 1, **changes: object) -> bf.Loader:
    arguments: dict = {"batch_size": 8, "window": 64}
    arguments |= {name: changes.pop(name) for name in ("batch_size", "max_tokens", "window") if name in changes}
    given: dict = {"shuffle": True, "seed": 3, "collate": numbers, "chunk_bytes": 4000, "streams": 4}
    topology = bf.Topology(rank, world_size)
    return bf.Loader(ds, batches=bf.LengthBuckets(LENGTHS, **arguments), topology=topology, **(given | changes))


def waste(batches: list[list[int]]) -> float:
    """The share of padding, were each batch padded to its longest."""
    padded = sum(len(batch) * max(LENGTHS[batch]) for batch in batches)
    return 1 - sum(LENGTHS[batch].sum() for batch in batches) / padded


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_have_samples_of_about_one_length_in_a_new_order_each_epoch(tars: bf.MapDataset, num_workers: int):
    with loader(tars, num_workers=num_workers) as loads:
        epochs = [list(loads) for _ in range(2)]
    plain = list(bf.Loader(tars, 8, shuffle=True, collate=numbers))
    for epoch in epochs:
        assert len(epoch) == len(loads) == SAMPLES // 8
        assert {len(batch) for batch in epoch} == {8}
        assert len({n for batch in epoch for n in batch}) == SAMPLES // 8 * 8
        assert waste(epoch) < waste(plain) / 3
        longest = [max(LENGTHS[batch]) for batch in epoch]
        assert longest != sorted(longest)
    assert epochs[0] != epochs[1]
    assert epochs == [list(e) for e in (loader(tars), at(loader(tars), 1))]


def at(loads: bf.Loader, epoch: int) -> bf.Loader:
    loads.epoch = epoch
    return loads


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("tail", ["drop", "pad", "uneven"])
@pytest.mark.parametrize("sizes", [{}, {"batch_size": None, "max_tokens": 2000}], ids=["batch_size", "max_tokens"])
def test_ranks_take_turns_in_one_row_of_batches(tars: bf.MapDataset, world_size: int, tail: str, sizes: dict):
    row = list(loader(tars, tail=tail, **sizes))
    shares = [list(loader(tars, rank, world_size, tail=tail, **sizes)) for rank in range(world_size)]
    assert [len(share) for share in shares] == [
        len(loader(tars, r, world_size, tail=tail, **sizes)) for r in range(world_size)
    ]
    whole = len(row) // world_size * world_size
    for rank, share in enumerate(shares):
        assert share[: len(row) // world_size] == row[rank:whole:world_size]
        if tail == "uneven":
            assert share == row[rank::world_size]
    if tail != "uneven":
        assert len({len(share) for share in shares}) == 1
    if tail == "pad":
        given_of_all = Counter(tuple(batch) for share in shares for batch in share)
        assert set(given_of_all) == {tuple(batch) for batch in row}
        assert sum(given_of_all.values()) == -(-len(row) // world_size) * world_size


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    cut=st.integers(0, 12),
    before=st.sampled_from([1, 2, 3, 5]),
    after=st.sampled_from([1, 2, 3, 5]),
    sizes=st.sampled_from([{"batch_size": 4}, {"max_tokens": 1000}, {"batch_size": 6, "max_tokens": 1500}]),
    epoch=st.integers(0, 2),
)
def test_a_run_cut_anywhere_goes_on_at_any_world_size(
    tars: bf.MapDataset, cut: int, before: int, after: int, sizes: dict, epoch: int
):
    sizes = {"batch_size": None, **sizes, "tail": "uneven"}
    expected = sorted(at(loader(tars, **sizes), epoch))
    cut = min(cut, len(expected) // before - 1)
    seen, states = [], []
    for rank in range(before):
        loads = at(loader(tars, rank, before, **sizes), epoch)
        batches = iter(loads)
        seen += [next(batches) for _ in range(cut)]
        states.append(json.loads(json.dumps(loads.state_dict())))
    assert all(state == states[0] for state in states)
    for rank in range(after):
        loads = loader(tars, rank, after, **sizes)
        loads.load_state_dict(states[0])
        seen += list(loads)
        assert loads.epoch == epoch + 1
    assert sorted(seen) == expected
    assert sorted(n for batch in seen for n in batch) == list(range(SAMPLES))


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(max_tokens=st.integers(400, 5000), batch_size=st.none() | st.integers(1, 20), window=st.integers(1, 300))
def test_no_batch_is_longer_than_max_tokens_and_none_could_take_the_next_sample(
    tars: bf.MapDataset, max_tokens: int, batch_size: int | None, window: int
):
    loads = loader(tars, max_tokens=max_tokens, batch_size=batch_size, window=window, shuffle=False)
    batches = list(loads)
    assert sorted(n for batch in batches for n in batch) == list(range(SAMPLES))
    assert all(len(batch) * max(LENGTHS[batch]) <= max_tokens for batch in batches)
    assert all(len(batch) <= (batch_size or SAMPLES) for batch in batches)
    for batch, then in pairwise(batches):
        if min(LENGTHS[then]) >= max(LENGTHS[batch]) and len(batch) != batch_size and window >= SAMPLES:
            assert (len(batch) + 1) * LENGTHS[then[0]] > max_tokens


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_state_goes_on_in_the_middle_of_a_window_with_the_bytes_of_each_sample(tars: bf.MapDataset, num_workers: int):
    def both(samples: list[dict]) -> list[tuple[int, bytes]]:
        return [(sample["n"], sample["x"].tobytes()) for sample in samples]

    whole = list(loader(tars, collate=both))
    assert all(x == bytes([n]) * LENGTHS[n] for batch in whole for n, x in batch)
    with loader(tars, collate=both, num_workers=num_workers) as loads:
        batches = iter(loads)
        first = [next(batches) for _ in range(11)]
        state = loads.state_dict()
        assert state["position"] == 11
        loads.load_state_dict(state)
        assert first + list(loads) == whole


def test_without_lengths_the_bytes_of_the_samples_count(tars: bf.MapDataset):
    given: dict = {"batches": bf.LengthBuckets(batch_size=8, window=64), "shuffle": True, "collate": numbers}
    assert waste(list(bf.Loader(tars, **given))) < 0.25
    raw = tars.select(slice(0, 100))
    assert sorted(n for batch in bf.Loader(raw, tail="uneven", **given) for n in batch) == list(range(100))


@pytest.mark.parametrize("tail", ["drop", "pad", "uneven"])
def test_what_a_window_no_longer_needs_is_let_go_when_the_next_one_begins(tars: bf.MapDataset, tail: str):
    order = bf.Order(tars.chunks(4000).counts, seed=3, streams=4)
    batches = bf.LengthBuckets(LENGTHS, 8, window=64).over(tars, 4000).batches(order, tail)
    division = BucketDivision(batches, bf.Topology(2, 3), tail, 0)
    wanted = [division.positions(number) for number in range(len(division))]
    passed = [division.passed(number, positions) for number, positions in enumerate(wanted)]
    if tail == "pad":  # 29 batches: the last rank repeats one, for which nothing is held
        assert passed.pop() == SAMPLES - 1
        wanted.pop()
    for number, (positions, end) in enumerate(zip(wanted, passed, strict=True)):
        assert positions.max() - 64 <= end < min(later.min() for later in wanted[number:])


def test_many_lengths_travel_to_workers_as_a_mapped_file():
    buckets = bf.LengthBuckets(np.random.default_rng(1).integers(1, 999, 1_000_000), batch_size=32)
    assert len(pickle.dumps(buckets)) < 1000


def test_states_without_buckets_are_as_they_were(tars: bf.MapDataset):
    state = bf.Loader(tars, 8).state_dict()
    assert "batches" not in state
    bf.Loader(tars, 16).load_state_dict(state)


@pytest.mark.parametrize(
    "other", [{"batch_size": 9}, {"window": 128}, {"batch_size": None, "max_tokens": 2000}, {"tail": "pad"}], ids=str
)
def test_a_state_of_other_batches_is_refused(tars: bf.MapDataset, other: dict):
    state = loader(tars).state_dict()
    with pytest.raises(ResumeError, match=r"batches='LengthBuckets\(batch_size=8.*the saved batches="):
        loader(tars, **other).load_state_dict(state)
    with pytest.raises(ResumeError, match="batches="):
        loader(tars).load_state_dict(bf.Loader(tars, 8, shuffle=True, seed=3, streams=4, chunk_bytes=4000).state_dict())


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda ds: bf.LengthBuckets(LENGTHS), "needs batch_size, max_tokens, or both"),
        (lambda ds: bf.LengthBuckets(LENGTHS, 0), "batch_size must be"),
        (lambda ds: bf.LengthBuckets(LENGTHS / 2, 4), "not float64 of shape"),
        (lambda ds: bf.LengthBuckets([-1], 4), "at least 0"),
        (lambda ds: bf.Loader(ds, batches=bf.LengthBuckets([1, 2], 4)), f"has 2 lengths, but .* has {SAMPLES} samples"),
        (lambda ds: loader(ds, max_tokens=300), r"sample \d+ has length 3\d\d, more than max_tokens=300"),
        (lambda ds: bf.Loader(ds, 4, batches=bf.LengthBuckets(LENGTHS, 4)), "in its place, not"),
        (lambda ds: bf.Loader(ds), "takes batch_size, or batches=.*not None and None"),
        (lambda ds: bf.Loader(ds, batches=[[0, 1]]), "in its place, not"),
        (lambda ds: loader(ds, 0, 50), "makes 28 batches of 230 samples, fewer than the 50 ranks"),
    ],
)
def test_what_can_not_be_is_named(tars: bf.MapDataset, make: object, text: str):
    with pytest.raises(ConfigError, match=text):
        make(tars)
