from __future__ import annotations

from pathlib import Path

import pytest
from torch.utils.data import DataLoader
from written import SAMPLES, payload, write_tars

import bucketfeed as bf


def hundred():
    yield from range(100)


def ids(stream: bf.StreamDataset, num_workers: int) -> list[int]:
    loader = DataLoader(stream, batch_size=None, num_workers=num_workers)
    return [int(i) for i in loader]


@pytest.mark.parametrize("num_workers", [0, 1, 3, 7])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_generator_gives_each_sample_once_over_all_ranks_and_workers_c050(num_workers: int, world_size: int):
    streams = [
        bf.StreamDataset.from_generator(hundred, topology=bf.Topology(rank, world_size)) for rank in range(world_size)
    ]
    assert sorted(i for stream in streams for i in ids(stream, num_workers)) == list(range(100))


@pytest.mark.parametrize("num_workers", [0, 3])
def test_drop_gives_every_rank_equally_many_c047(num_workers: int):
    parts = 3 * max(1, num_workers)
    streams = [bf.StreamDataset(hundred, tail="drop", topology=bf.Topology(rank, 3)) for rank in range(3)]
    got = [ids(stream, num_workers) for stream in streams]
    assert {len(part) for part in got} == {100 // parts * (parts // 3)}
    assert len({i for part in got for i in part}) == 100 // parts * parts


@pytest.mark.parametrize("num_workers", [0, 2])
def test_shards_are_shared_out_whole(num_workers: int):
    stream = bf.StreamDataset.from_generator(lambda shard: (shard * 10 + i for i in range(3)), shards=[1, 2, 3, 4, 5])
    assert sorted(ids(stream, num_workers)) == sorted(s * 10 + i for s in range(1, 6) for i in range(3))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_tars_stream_without_an_index_and_give_what_the_index_gives(tmp_path: Path, num_workers: int):
    folder = write_tars(tmp_path / "t")
    stream = bf.StreamDataset.from_tars(str(folder), decode=lambda s: (s["__key__"], s["bin"]))
    got = dict(DataLoader(stream, batch_size=None, num_workers=num_workers))
    assert got == {f"{n:05}": payload(n) for n in range(SAMPLES)}
    assert list(stream) == [(s["__key__"], s["bin"]) for s in bf.open_dataset(folder, cache=None)]


def test_bad_arguments_and_failing_decodes_are_named(tmp_path: Path):
    with pytest.raises(bf.errors.ConfigError, match="function"):
        bf.StreamDataset(iter([1]))
    with pytest.raises(bf.errors.ConfigError, match="tail"):
        bf.StreamDataset(hundred, tail="pad")
    with pytest.raises(bf.errors.ConfigError, match="shards"):
        bf.StreamDataset(hundred, shards=[1], tail="drop")
    with pytest.raises(bf.errors.DecodeError, match="ZeroDivisionError"):
        list(bf.StreamDataset(hundred, decode=lambda n: 1 / n))


def test_a_stream_over_ranks_says_that_batches_may_differ(caplog: pytest.LogCaptureFixture):
    bf.StreamDataset(hundred, topology=bf.Topology(0, 2))
    assert "different numbers of batches" in caplog.text
