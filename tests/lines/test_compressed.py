"""Compressed shards: all members and frames, decompressed once a node, and a named error for damage."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import pickle
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import zstandard
from files import PACKED, fields, loaded, opened, put

import bucketfeed as bf
from bucketfeed.errors import FormatError
from bucketfeed.testing.moto import MotoBucket

COMPRESSED = [packed for packed in PACKED if packed]
LINES = [{"id": n, "t": f"line {n} " * (n % 9)} for n in range(300)]
BODY = "".join(json.dumps(line) + "\n" for line in LINES).encode()
IDS = list(range(300))


@pytest.mark.parametrize("packed", COMPRESSED)
@pytest.mark.parametrize("cuts", [(), (7,), (0, 5000, 5001, len(BODY))], ids=["one", "two", "five, two of them empty"])
def test_all_members_are_read_as_the_plain_file(tmp_path: Path, packed: str, cuts: tuple[int, ...]) -> None:
    edges = [0, *cuts, len(BODY)]
    parts = [PACKED[packed](BODY[a:b]) for a, b in itertools.pairwise(edges)]
    dataset = opened(put(tmp_path / "d", {f"a.jsonl{packed}": b"".join(parts), "b.jsonl": BODY}))
    assert fields(dataset, "id") == IDS * 2
    assert loaded(dataset, "id", chunk_bytes=3000) == IDS * 2


@pytest.mark.parametrize("packed", COMPRESSED)
def test_worker_processes_read_them(tmp_path: Path, packed: str) -> None:
    dataset = opened(put(tmp_path / "d", {f"a.jsonl{packed}": PACKED[packed](BODY)}))
    assert loaded(dataset, "id", num_workers=2, chunk_bytes=3000) == IDS


@pytest.mark.parametrize("packed", COMPRESSED)
@pytest.mark.parametrize("part", [0.2, 0.9])
def test_a_cut_file_is_an_error_that_names_it(tmp_path: Path, packed: str, part: float) -> None:
    data = PACKED[packed](BODY)
    folder = put(tmp_path / "d", {f"a.jsonl{packed}": data[: int(len(data) * part)]})
    with pytest.raises(FormatError, match=rf"a\.jsonl\{packed}: the \w+ data ends early"):
        opened(folder)


@pytest.mark.parametrize("packed", COMPRESSED)
def test_what_is_not_compressed_at_all_is_an_error_that_names_it(tmp_path: Path, packed: str) -> None:
    folder = put(tmp_path / "d", {f"a.jsonl{packed}": BODY})
    with pytest.raises(FormatError, match=rf"a\.jsonl\{packed}: damaged \w+ data"):
        opened(folder)


def test_a_flipped_byte_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    for packed in (".gz", ".bz2"):
        data = bytearray(PACKED[packed](BODY))
        data[len(data) // 2] ^= 1
        with pytest.raises(FormatError, match=rf"a\.jsonl\{packed}: damaged"):
            opened(put(tmp_path / packed[1:], {f"a.jsonl{packed}": bytes(data)}))


def test_zstd_with_a_long_window_is_read(tmp_path: Path) -> None:
    options = zstandard.ZstdCompressionParameters(window_log=28, enable_ldm=True)
    stream = zstandard.ZstdCompressor(compression_params=options).compressobj()
    data = stream.compress(BODY) + stream.flush()
    assert fields(opened(put(tmp_path / "d", {"a.jsonl.zst": data})), "id") == IDS


def ids_read(pickled: bytes) -> tuple[list[int], int]:
    """Return the ids that a process reads, and the requests it makes."""
    dataset = pickle.loads(pickled)
    ids = [sample["id"] for sample in dataset]
    return ids, dataset.stats().requests


@pytest.mark.parametrize("cached", [True, False], ids=["with a cache", "with cache=None"])
def test_a_shard_is_fetched_and_decompressed_once_a_node(tmp_path: Path, moto_bucket: MotoBucket, cached: bool) -> None:
    moto_bucket.put("d/a.jsonl.gz", PACKED[".gz"](BODY))
    moto_bucket.put("d/b.jsonl.zst", PACKED[".zst"](BODY))
    cache = bf.DiskCache(tmp_path / "cache", "100MB")
    dataset = bf.open_dataset(
        f"{moto_bucket.url}d/",
        storage_options=moto_bucket.storage_options,
        cache=cache if cached else None,
        progress=False,
    )
    after_opening = dataset.stats().requests
    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(lambda: [sample["id"] for sample in dataset]) for _ in range(4)]
        assert all(future.result() == IDS * 2 for future in futures)
    context = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(2, mp_context=context) as processes:
        found = list(processes.map(ids_read, [pickle.dumps(dataset)] * 2))
    assert [ids for ids, _ in found] == [IDS * 2] * 2
    assert dataset.stats().requests - after_opening + sum(requests for _, requests in found) == 0


def test_several_processes_that_find_nothing_kept_decompress_it_once(tmp_path: Path, moto_bucket: MotoBucket) -> None:
    moto_bucket.put("d/a.jsonl.gz", PACKED[".gz"](BODY))
    url, options = f"{moto_bucket.url}d/", moto_bucket.storage_options
    index = bf.open_dataset(url, storage_options=options, cache=None, progress=False).index
    empty = bf.DiskCache(tmp_path / "empty", "100MB")
    dataset = bf.open_dataset(url, storage_options=options, cache=empty, index=index, progress=False)
    context = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(3, mp_context=context) as processes:
        found = list(processes.map(ids_read, [pickle.dumps(dataset)] * 3))
    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(lambda _: len([sample["id"] for sample in dataset]) == 300, range(4)))
    assert [ids for ids, _ in found] == [IDS] * 3
    assert dataset.stats().requests + sum(requests for _, requests in found) == 1


def test_a_cache_too_small_for_what_is_decompressed_is_told_of_and_all_is_read(tmp_path: Path, caplog: Any) -> None:
    body = "".join(f'{{"id": {n}, "t": "{"x" * 20_000}"}}\n' for n in range(300)).encode()
    folder = put(tmp_path / "d", {"a.jsonl.gz": PACKED[".gz"](body)})
    dataset = opened(folder, cache=bf.DiskCache(tmp_path / "small", "5MB"))
    told = [record.message for record in caplog.records if "decompressed" in record.message]
    assert len(told) == 1
    assert "limit_bytes=" in told[0]
    assert loaded(dataset, "id") == IDS
    caplog.clear()
    opened(folder, cache=bf.DiskCache(tmp_path / "large", "50MB"))
    assert not [record for record in caplog.records if "decompressed" in record.message]
