"""Streams of objects that are read in order, without an index; views of streams; their state."""

from __future__ import annotations

import bz2
import gzip
import io
import itertools
import pickle
import tarfile
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

import bucketfeed as bf


def hundred() -> Iterator[int]:
    yield from range(100)


def jsonl(numbers: range) -> bytes:
    return b"".join(b'{"n": %d}\n' % n for n in numbers)


def tar(numbers: range) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for n in numbers:
            member = tarfile.TarInfo(f"{n:03}.bin")
            member.size = n
            archive.addfile(member, io.BytesIO(bytes(n)))
    return out.getvalue()


KINDS = {
    "jsonl": jsonl,
    "jsonl.gz": lambda numbers: gzip.compress(jsonl(numbers)),
    "csv": lambda numbers: b"n,t\n" + b"".join(b'%d,"x\ny"\n' % n for n in numbers),
    "tsv.bz2": lambda numbers: bz2.compress(b"n\n" + b"".join(b"%d\n" % n for n in numbers)),
    "tar": tar,
    "bin": lambda numbers: bytes(numbers),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_gives_what_random_access_gives_in_order(tmp_path: Path, kind: str) -> None:
    for shard in range(3):
        (tmp_path / f"{shard}.{kind}").write_bytes(KINDS[kind](range(10 * shard, 10 * shard + 10)))
    assert list(bf.StreamDataset.from_url(tmp_path)) == list(bf.open_dataset(tmp_path, cache=None))


def test_text_from_a_bucket_comes_once_over_ranks(moto_bucket: Any) -> None:
    for shard in range(5):
        moto_bucket.put(f"d/{shard}.txt", b"".join(b"%d\n" % n for n in range(10 * shard, 10 * shard + 10)))
    got = []
    for rank in range(2):
        stream = bf.StreamDataset.from_url(
            f"{moto_bucket.url}d/",
            format="text",
            storage_options=moto_bucket.storage_options,
            topology=bf.Topology(rank, 2),
            decode=lambda sample: int(sample["text"]),
        )
        got += [int(n) for n in stream]
    assert sorted(got) == list(range(50))


@pytest.mark.parametrize("num_workers", [1, 2])
def test_lines_come_once_over_workers_c050(tmp_path: Path, num_workers: int) -> None:
    for shard in range(5):
        (tmp_path / f"{shard}.jsonl").write_bytes(jsonl(range(10 * shard, 10 * shard + 10)))
    stream = bf.StreamDataset.from_url(tmp_path, decode=lambda sample: sample["n"])
    assert sorted(DataLoader(stream, batch_size=None, num_workers=num_workers)) == list(range(50))


def test_of_a_large_object_little_is_in_memory(tmp_path: Path) -> None:
    with open(tmp_path / "a.jsonl", "wb") as file:
        for _ in range(96):
            file.write(b'{"text": "%s"}\n' % (b"x" * 1_000_000))
    stream = bf.StreamDataset.from_url(tmp_path, decode=lambda sample: len(sample["text"]))
    tracemalloc.start()
    try:
        assert sum(stream) == 96_000_000
        assert tracemalloc.get_traced_memory()[1] < 40 << 20
    finally:
        tracemalloc.stop()


def test_damage_is_named_by_object_and_what_came_before_is_given(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"n": 1}\n{"n": 2\n')
    samples = iter(bf.StreamDataset.from_url(tmp_path))
    assert next(samples)["n"] == 1
    with pytest.raises(
        bf.errors.FormatError, match=r"after 1 samples: file://.*a\.jsonl: no JSON in the line at byte 9"
    ):
        next(samples)


def test_arrays_and_nothing_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x.npy").write_bytes(b"")
    with pytest.raises(bf.errors.ConfigError, match="use open_dataset"):
        bf.StreamDataset.from_url(tmp_path)
    with pytest.raises(bf.errors.NotFoundError):
        bf.StreamDataset.from_url(tmp_path / "nothing")


@pytest.mark.parametrize("tail", ["uneven", "drop"])
@pytest.mark.parametrize("n", [0, 7, 12, 1000])
def test_take_gives_the_first_samples_shared_out_over_ranks(n: int, tail: Any) -> None:
    parts = [list(bf.StreamDataset(hundred, topology=bf.Topology(rank, 3), tail=tail).take(n)) for rank in range(3)]
    whole = min(n, 100) if tail == "uneven" else min(n, 100) // 3 * 3
    assert sorted(itertools.chain(*parts)) == list(range(whole))
    if tail == "drop":
        assert len({len(part) for part in parts}) == 1


def test_take_reads_no_further_than_it_must() -> None:
    read: list[int] = []

    def endless() -> Iterator[int]:
        for n in itertools.count():
            read.append(n)
            yield n

    assert list(bf.StreamDataset(endless).take(3).take(5)) == [0, 1, 2]
    assert read == [0, 1, 2]


def test_repeat_gives_every_round_in_an_order_of_its_own() -> None:
    stream = bf.StreamDataset(hundred, shuffle_buffer=30, seed=3)
    given = tuple(stream.repeat(2).repeat(2))
    rounds = [given[at : at + 100] for at in range(0, 400, 100)]
    assert len(rounds) == len(set(rounds)) == 4
    assert all(sorted(some) == list(range(100)) for some in rounds)
    assert rounds[0] == tuple(stream)
    assert list(bf.StreamDataset(hundred).take(3).repeat(2)) == [0, 1, 2, 0, 1, 2]
    assert list(bf.StreamDataset(hundred).repeat().take(203)) == [*range(100), *range(100), 0, 1, 2]


def test_an_endless_repetition_of_nothing_ends() -> None:
    assert list(bf.StreamDataset(lambda: []).repeat()) == []
    assert list(bf.StreamDataset(hundred).take(0).repeat()) == []


@pytest.mark.parametrize("num_workers", [0, 2])
def test_shards_are_repeated_and_taken_over_workers(num_workers: int) -> None:
    stream = bf.StreamDataset.from_generator(lambda shard: [shard] * 4, shards=range(6)).repeat().take(50)
    got = [int(n) for n in DataLoader(stream, batch_size=None, num_workers=num_workers)]
    assert len(got) == 50
    assert set(got) == set(range(6))


@pytest.mark.parametrize("buffer", [0, 16])
def test_a_state_taken_in_any_round_resumes_there_c052(buffer: int) -> None:
    def made() -> bf.StreamDataset:
        return bf.StreamDataset(hundred, shuffle_buffer=buffer).take(40).repeat(3).take(110)

    whole = list(made())
    assert len(whole) == 110
    for stop in (0, 1, 40, 55, 80, 109, 110):
        first, rest = made(), made()
        got = list(itertools.islice(first, stop))
        rest.load_state_dict(pickle.loads(pickle.dumps(first)).state_dict())
        assert got + list(rest) == whole
        assert list(rest) == whole


def test_a_resumed_repetition_reads_one_round_at_most() -> None:
    rounds = 0

    def counted() -> Iterator[int]:
        nonlocal rounds
        rounds += 1
        yield from range(10)

    first = bf.StreamDataset(counted).repeat()
    list(itertools.islice(first, 95))
    assert rounds == 10
    rest = bf.StreamDataset(counted).repeat()
    rest.load_state_dict(first.state_dict())
    assert list(itertools.islice(rest, 5)) == [5, 6, 7, 8, 9]
    assert rounds == 11


def test_views_that_cannot_be_are_named() -> None:
    stream = bf.StreamDataset(hundred)
    with pytest.raises(bf.errors.ConfigError, match="repeat before you take"):
        stream.repeat(2).take(3).repeat()
    for call in (lambda: stream.repeat(0), lambda: stream.take(-1), lambda: stream.take(1.5)):
        with pytest.raises(bf.errors.ConfigError, match="whole number"):
            call()


def test_fewer_shards_than_parts_are_told_of(caplog: pytest.LogCaptureFixture) -> None:
    list(bf.StreamDataset(lambda shard: [shard], shards=[1], topology=bf.Topology(0, 2)))
    assert "a stream of 1 shards for 2 parts" in caplog.text
