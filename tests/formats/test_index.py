"""Where samples are: built once, kept, shared, in chunks, and the same as reading from front to back."""

from __future__ import annotations

import multiprocessing
import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tars import archive, streamed

from bucketfeed.cache.disk import DiskCache
from bucketfeed.cache.reader import CachedReader
from bucketfeed.errors import CacheError, ConfigError, FormatError
from bucketfeed.formats.index import Index, build_index, sample_from
from bucketfeed.store.manifest import Manifest
from bucketfeed.store.readers import open_reader
from bucketfeed.testing.readers import FailingReader, MemoryReader, RecordingReader

ROOT = "s3://bucket/shards/"
CHUNK = 4096


def shards(count: int = 4, samples: int = 12, most: int = 3000) -> dict[str, tuple[bytes, str]]:
    """Return tars by url, with etags."""
    rng = random.Random(17)
    objects = {}
    for shard in range(count):
        members = []
        for sample in range(samples):
            members += [
                (f"{shard}/{sample:03}.jpg", rng.randbytes(rng.randrange(most))),
                (f"{shard}/{sample:03}.cls", b"1"),
            ]
        objects[f"{ROOT}{shard}.tar"] = archive(members), f"etag-{shard}"
    return objects


def manifest_of(objects: dict[str, tuple[bytes, str]], folder: Path) -> Manifest:
    return Manifest.from_objects(ROOT, [(url, len(data), etag) for url, (data, etag) in objects.items()], folder=folder)


def all_samples(index: Index, reader: Any) -> list[dict[str, Any]]:
    return [sample_from(index, i, reader.read([index.range(i)])[0]) for i in range(len(index))]


def test_samples_by_number_are_those_from_front_to_back(tmp_path: Path) -> None:
    objects = shards()
    reader = MemoryReader(objects)
    index = build_index(manifest_of(objects, tmp_path), "tar", reader, folder=tmp_path, chunk_bytes=CHUNK)
    expected = [sample for data, _ in objects.values() for sample in streamed(data)]
    assert len(index) == len(expected) == 48
    assert all_samples(index, reader) == expected
    assert index.range(13).etag == "etag-1"


def test_locate_gives_shard_start_and_length_in_the_order_asked(tmp_path: Path) -> None:
    objects = shards()
    index = build_index(manifest_of(objects, tmp_path), "tar", MemoryReader(objects), folder=tmp_path)
    asked = np.array([40, 0, 13, 13])
    rows = zip(*index.locate(asked), strict=True)
    ranges = [index.manifest.range(int(shard), int(start), int(start + length)) for shard, start, length in rows]
    assert ranges == [index.range(i) for i in asked.tolist()]


def test_numbers_beyond_the_end_are_refused(tmp_path: Path) -> None:
    index = Index(manifest_of(shards(), tmp_path), "raw")
    for i in (-1, 4):
        with pytest.raises(IndexError):
            index.range(i)


def test_words_hold_large_offsets_and_shard_numbers(tmp_path: Path) -> None:
    manifest = manifest_of(shards(1), tmp_path)
    given = (
        np.array([0, 65_535, 65_536, (1 << 32) - 1]),
        np.array([0, 1, (1 << 48) - 1, 5]),
        np.array([7, 0, 1, 1 << 47]),
    )
    index = Index.write(tmp_path / "big.idx", manifest, "tar", *given)
    for got, want in zip(index.locate(np.arange(4)), given, strict=True):
        np.testing.assert_array_equal(got, want)


def test_each_object_is_read_once_and_the_second_time_not_at_all(tmp_path: Path) -> None:
    objects = shards()
    manifest, reader = manifest_of(objects, tmp_path), MemoryReader(objects)
    first = build_index(manifest, "tar", reader, folder=tmp_path, chunk_bytes=CHUNK)
    fetched = reader.counter.counts().bytes_fetched
    assert fetched <= manifest.total_bytes
    second = build_index(manifest, "tar", reader, folder=tmp_path, chunk_bytes=CHUNK)
    assert reader.counter.counts().bytes_fetched == fetched
    assert second.path == first.path == tmp_path / f"{first.fingerprint}.idx"


def test_large_members_are_hopped_over(tmp_path: Path) -> None:
    objects = {f"{ROOT}0.tar": (archive([(f"{i}.mp4", bytes(2_000_000)) for i in range(5)]), "e")}
    reader = MemoryReader(objects)
    index = build_index(manifest_of(objects, tmp_path), "tar", reader, folder=tmp_path, chunk_bytes=100_000)
    assert len(index) == 5
    assert reader.counter.counts().bytes_fetched < 2_500_000


def test_the_index_may_be_kept_where_the_caller_says(tmp_path: Path) -> None:
    objects = shards()
    path = tmp_path / "kept" / "train.index"
    index = build_index(manifest_of(objects, tmp_path), "tar", MemoryReader(objects), folder=tmp_path, path=path)
    assert index.path == path
    assert [file.name for file in path.parent.iterdir()] == ["train.index"]


def test_an_index_of_other_data_is_built_anew_and_a_foreign_file_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "train.index"
    for count in (4, 2):
        objects = shards(count)
        index = build_index(manifest_of(objects, tmp_path), "tar", MemoryReader(objects), path=path)
        assert len(index) == 12 * count
    path.write_bytes(b"my thesis, the only copy")
    with pytest.raises(ConfigError, match="is no index, it starts with b'my thesis"):
        build_index(manifest_of(objects, tmp_path), "tar", MemoryReader(objects), path=path)
    assert path.read_bytes() == b"my thesis, the only copy"


@pytest.mark.parametrize("keep", [0, 10, 64, 200])
def test_a_damaged_index_is_built_anew(tmp_path: Path, keep: int) -> None:
    objects = shards()
    manifest, reader = manifest_of(objects, tmp_path), MemoryReader(objects)
    path = build_index(manifest, "tar", reader, folder=tmp_path).path
    assert path is not None
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CacheError, match="index"):
        Index.open(path, manifest)
    assert len(build_index(manifest, "tar", reader, folder=tmp_path)) == 48


def test_a_bad_shard_is_named_and_the_good_ones_need_not_be_read_again(tmp_path: Path) -> None:
    objects = shards(20)
    objects[f"{ROOT}9.tar"] = archive([("9/000.jpg", bytes(3000))])[:2000], "etag-9"
    manifest = manifest_of(objects, tmp_path)
    with pytest.raises(FormatError, match=r"s3://bucket/shards/9\.tar: ends too early"):
        build_index(manifest, "tar", MemoryReader(objects), folder=tmp_path, chunk_bytes=CHUNK)
    kept = [path for path in tmp_path.iterdir() if path.suffix == ".parts"]
    assert len(kept) == 1
    objects[f"{ROOT}9.tar"] = archive([("9/000.cls", b"1")])[:2000], "etag-9"
    kept[0].write_bytes(kept[0].read_bytes() + b"torn")
    recording = RecordingReader(MemoryReader(objects))
    index = build_index(manifest, "tar", recording, folder=tmp_path, chunk_bytes=CHUNK)
    assert len(index) == 19 * 12 + 1
    # The bad shard is the last of the keys, and 16 run side by side: four at least were done before it began.
    assert len({range.url for call in recording.calls for range in call}) <= 16
    assert not kept[0].exists()


def test_an_error_of_the_reader_comes_through_and_the_next_try_works(tmp_path: Path) -> None:
    objects = shards()
    reader = FailingReader(MemoryReader(objects), fail_first=1)
    manifest = manifest_of(objects, tmp_path)
    with pytest.raises(OSError, match="as the test asked"):
        build_index(manifest, "tar", reader, folder=tmp_path)
    assert len(build_index(manifest, "tar", reader, folder=tmp_path)) == 48


def _build(folder: str, out: Any) -> None:
    reader = open_reader(f"{folder}/data")
    manifest = Manifest.from_url(f"{folder}/data", folder=folder)
    index = build_index(manifest, "tar", reader, folder=Path(folder), chunk_bytes=CHUNK)
    out.put((len(index), reader.counter.counts().bytes_fetched))


def test_processes_that_ask_at_the_same_time_build_it_once(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for url, (data, _) in shards(8).items():
        (tmp_path / "data" / url.rsplit("/", 1)[1]).write_bytes(data)
    context = multiprocessing.get_context("spawn")
    out = context.Queue()
    processes = [context.Process(target=_build, args=(str(tmp_path), out)) for _ in range(3)]
    for process in processes:
        process.start()
    results = [out.get(timeout=60) for _ in processes]
    for process in processes:
        process.join(60)
    assert [samples for samples, _ in results] == [96, 96, 96]
    assert sorted(fetched > 0 for _, fetched in results) == [False, False, True]


def test_an_unwritable_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    objects = shards(1)
    with pytest.raises(CacheError, match="file"):
        build_index(manifest_of(objects, tmp_path), "tar", MemoryReader(objects), folder=tmp_path / "file")


def test_an_unknown_format_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    objects = shards(1)
    with pytest.raises(ConfigError, match="no format 'zip'; choose one of 'auto', 'raw', 'tar'"):
        build_index(manifest_of(objects, tmp_path), "zip", MemoryReader(objects))


def test_files_beside_tars_hold_no_samples(tmp_path: Path) -> None:
    objects = {**shards(1), f"{ROOT}README.md": (b"# digits", "r"), f"{ROOT}a.json": (b"{}", "j")}
    assert len(build_index(manifest_of(objects, tmp_path), "tar", MemoryReader(objects), folder=tmp_path)) == 12


def test_tars_may_have_other_names_where_the_format_is_given(tmp_path: Path) -> None:
    objects = {url.removesuffix(".tar"): value for url, value in shards(2).items()}
    assert len(build_index(manifest_of(objects, tmp_path), "tar", MemoryReader(objects), folder=tmp_path)) == 24


def test_shards_without_samples_give_an_empty_index(tmp_path: Path) -> None:
    objects = {f"{ROOT}0.tar": (archive([]), "e")}
    index = build_index(manifest_of(objects, tmp_path), "tar", MemoryReader(objects), folder=tmp_path)
    assert len(index) == len(index.chunks(CHUNK)) == 0


# -- chunks


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(0, 5000), max_size=20), min_size=1, max_size=4), st.integers(1, 20_000))
def test_a_chunk_is_the_samples_of_one_shard_that_start_in_one_cell(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[list[int]], chunk_bytes: int
) -> None:
    folder = tmp_path_factory.mktemp("index")
    manifest = Manifest.from_objects(
        ROOT, [(f"{ROOT}{i}.tar", 1 << 20, "e") for i in range(len(lengths))], folder=folder
    )
    rows = []
    for shard, row in enumerate(lengths):
        start = 0
        for length in row:
            rows.append((shard, start, length))
            start += length + 512
    columns = [np.array([row[i] for row in rows], np.int64) for i in range(3)]
    index = Index.write(folder / "x.idx", manifest, "tar", *columns)
    chunks = index.chunks(chunk_bytes)
    cells = [(shard, start // chunk_bytes) for shard, start, _ in rows]
    assert len(chunks) == len(set(cells))
    assert np.sum(chunks.counts) == len(index)
    for sample, chunk in enumerate(chunks.of(np.arange(len(index))).tolist()):
        inner, outer = index.range(sample), chunks.range(chunk)
        assert inner.url == outer.url
        assert outer.start <= inner.start <= inner.stop <= outer.stop
        assert chunks.size(chunk) == outer.length
        assert cells[sample] == sorted(set(cells))[chunk]


def test_raw_objects_are_chunks_of_their_own_without_any_array(tmp_path: Path) -> None:
    manifest = manifest_of(shards(3), tmp_path)
    index = build_index(manifest, "raw", MemoryReader({}), folder=tmp_path)
    chunks = index.chunks(CHUNK)
    assert (chunks.counts, chunks.first, index.path) == (3, None, None)
    assert chunks.of(np.array([2, 0])).tolist() == [2, 0]
    assert chunks.range(1) == index.range(1) == manifest.range(1)
    assert chunks.size(1) == manifest.size(1)


def test_index_and_chunks_pickle_small_and_come_back_the_same(tmp_path: Path) -> None:
    objects = shards(4, samples=100)
    index = build_index(manifest_of(objects, tmp_path), "tar", MemoryReader(objects), folder=tmp_path)
    for one in (index, build_index(index.manifest, "raw", MemoryReader({}))):
        chunks = one.chunks(CHUNK)
        state = pickle.dumps((one, chunks))
        assert len(state) < 1000
        again, chunks_again = pickle.loads(state)
        assert again.fingerprint == one.fingerprint
        assert again.range(3) == one.range(3)
        assert chunks_again.range(3) == chunks.range(3)


def test_the_fingerprint_is_of_data_and_format(tmp_path: Path) -> None:
    one, other = manifest_of(shards(2), tmp_path), manifest_of(shards(3), tmp_path)
    assert Index(one, "raw").fingerprint == Index(Manifest.open(one.path), "raw").fingerprint
    assert Index(one, "raw").fingerprint != Index(other, "raw").fingerprint
    path = Index.write(tmp_path / "x", one, "tar", *[np.zeros(1, np.int64)] * 3).path
    assert path is not None
    assert Index.open(path, one).fingerprint != Index(one, "raw").fingerprint
    with pytest.raises(CacheError, match="is of other data"):
        Index.open(path, other)


# -- the cache


def test_building_fills_the_cache_with_every_chunk(tmp_path: Path) -> None:
    objects = shards()
    inner = MemoryReader(objects)
    cache = DiskCache(tmp_path / "cache", "100MB")
    reader = CachedReader(inner, cache)
    index = build_index(
        manifest_of(objects, tmp_path), "tar", reader, cache=cache, folder=cache.index_folder, chunk_bytes=CHUNK
    )
    fetched = inner.counter.counts().bytes_fetched
    chunks = index.chunks(CHUNK)
    assert cache.stats().files == len(chunks) > 4
    for i in range(len(index)):
        whole = chunks.range(int(chunks.of(np.array([i]))[0]))
        wanted = index.range(i)
        data, _ = objects[wanted.url]
        assert reader.read([wanted], within=[whole]) == [data[wanted.start : wanted.stop]]
    assert inner.counter.counts().bytes_fetched == fetched


def test_a_cache_that_cannot_take_all_keeps_what_came_first(tmp_path: Path) -> None:
    objects = shards(40, samples=30)
    cache = DiskCache(tmp_path / "cache", 1 << 20)
    manifest = manifest_of(objects, tmp_path)
    assert manifest.total_bytes > 1 << 20
    build_index(
        manifest, "tar", CachedReader(MemoryReader(objects), cache), cache=cache, folder=tmp_path, chunk_bytes=100_000
    )
    stats = cache.stats()
    assert stats.files > 0
    assert stats.bytes_used <= stats.limit_bytes
