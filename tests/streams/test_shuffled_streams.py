"""Streams with a shuffle buffer, a state, endless sources and sources that fail."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from torch.utils.data import DataLoader

import bucketfeed as bf
from bucketfeed.data.stream import size_of


def hundred() -> Iterator[int]:
    yield from range(100)


def test_the_order_depends_on_seed_and_epoch_and_each_sample_comes_once() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        stream = bf.StreamDataset(hundred, shuffle_buffer=20, seed=seed)
        stream.set_epoch(epoch)
        return list(stream)

    assert sorted(order(1, 0)) == list(range(100))
    assert order(1, 0) == order(1, 0)
    assert len({tuple(order(seed, epoch)) for seed in (1, 2) for epoch in (0, 1)}) == 4


@pytest.mark.parametrize("num_workers", [0, 3])
def test_shuffled_shards_come_once_over_workers_c050(num_workers: int) -> None:
    stream = bf.StreamDataset.from_generator(
        lambda shard: iter(range(10 * shard, 10 * shard + 10)), shards=range(7), shuffle_buffer=8
    )
    got = [int(i) for i in DataLoader(stream, batch_size=None, num_workers=num_workers)]
    assert sorted(got) == list(range(70))


@pytest.mark.parametrize("buffer", [0, 16])
def test_a_state_taken_anywhere_resumes_exactly_c052(buffer: int) -> None:
    whole = list(bf.StreamDataset(hundred, shuffle_buffer=buffer))
    for stop in (0, 1, 37, 99, 100):
        first = bf.StreamDataset(hundred, shuffle_buffer=buffer)
        got = list(itertools.islice(first, stop))
        rest = bf.StreamDataset(hundred, shuffle_buffer=buffer)
        rest.load_state_dict(first.state_dict())
        assert rest.state_dict() == first.state_dict()
        assert got + list(rest) == whole
        assert list(rest) == whole
    with pytest.raises(bf.errors.ResumeError, match="seed 5"):
        bf.StreamDataset(hundred, seed=5).load_state_dict(first.state_dict())


def test_an_endless_source_is_read_no_further_than_the_buffer_in_bytes() -> None:
    read = 0

    def endless() -> Iterator[bytes]:
        nonlocal read
        for _ in itertools.count():
            read += 1
            yield bytes(1000)

    bound = 50 * size_of(bytes(1000))
    stream = bf.StreamDataset(endless, shuffle_buffer=10**6, shuffle_buffer_bytes=bound)
    assert sum(1 for _ in itertools.islice(stream, 10_000)) == 10_000
    assert read == 10_050


def test_a_source_that_fails_names_its_shard() -> None:
    def source(shard: str) -> Iterator[int]:
        yield 1
        raise OSError("torn")

    with pytest.raises(bf.errors.ReadError, match=r"shard 'a' .* after 1 samples: OSError: torn"):
        list(bf.StreamDataset(source, shards=["a"]))
