from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
from written import SAMPLES, payload, write_raw, write_tars

import bucketfeed as bf


def test_a_raw_sample_is_its_key_and_one_field_named_by_its_extension(raw: bf.MapDataset):
    assert len(raw) == SAMPLES
    assert raw[0] == {"__key__": "class0/00000", "bin": payload(0)}
    assert {sample["__key__"][-5:]: sample["bin"] for sample in raw} == {f"{n:05}": payload(n) for n in range(SAMPLES)}


def test_a_tar_sample_has_a_field_for_each_member(tars: bf.MapDataset):
    assert len(tars) == SAMPLES
    assert tars[17] == {"__key__": "00017", "bin": payload(17), "cls": b"2"}


def test_numbers_count_from_the_end_too_and_stop_at_the_length(tars: bf.MapDataset):
    assert tars[-1] == tars[SAMPLES - 1]
    assert tars[np.int64(3)] == tars[3]
    for outside in (SAMPLES, -SAMPLES - 1):
        with pytest.raises(IndexError, match=f"{SAMPLES} samples"):
            tars[outside]
    with pytest.raises(TypeError):
        tars["3"]


def test_a_batch_is_one_read_in_the_order_asked_with_repeats(tars: bf.MapDataset):
    wanted = [5, 99, 5, 0, -1]
    assert tars.__getitems__(wanted) == [tars[i] for i in wanted]


def test_decode_gets_the_sample_and_its_failure_names_it(tmp_path: Path):
    def decode(sample):
        if sample["cls"] == b"1":
            raise KeyError("no such label")
        return int(sample["cls"])

    ds = bf.open_dataset(write_tars(tmp_path / "t"), cache=None, decode=decode)
    assert ds[0] == 0
    with pytest.raises(bf.errors.DecodeError, match=r"'00001'.*shard-00000\.tar.*bin, cls.*KeyError.*no such label"):
        ds[1]


def test_a_pickled_copy_reads_the_same_and_is_small_however_many_samples(tmp_path: Path):
    small = bf.open_dataset(write_raw(tmp_path / "a", 3), cache=None)
    large = bf.open_dataset(write_raw(tmp_path / "b", 1000), cache=None, decode=lambda s: s["bin"])
    assert len(pickle.dumps(large)) < len(pickle.dumps(small)) + 2000 < 10_000
    assert pickle.loads(pickle.dumps(large))[999] == large[999]


def test_a_data_set_once_opened_keeps_its_list_and_a_new_one_sees_the_present_c024(tmp_path: Path):
    folder = write_raw(tmp_path / "raw", 4)
    before = bf.open_dataset(folder, cache=None)
    (folder / "class0" / "99999.bin").write_bytes(b"new")
    (folder / "class1" / "00001.bin").unlink()
    after = bf.open_dataset(folder, cache=None)
    assert len(before) == len(after) == 4
    assert [s["__key__"] for s in after] == ["class0/00000", "class0/00003", "class0/99999", "class2/00002"]
    gone = next(i for i in range(4) if before.manifest.key(i).endswith("00001.bin"))
    with pytest.raises(bf.errors.NotFoundError, match=r"00001\.bin"):
        before[gone]


def test_an_object_replaced_after_listing_is_an_error_with_both_versions_and_new_bytes_after_reopening_c004(
    tmp_path: Path,
):
    folder = write_raw(tmp_path / "raw", 4)
    cache = bf.DiskCache(tmp_path / "cache", "10MB")
    victim = folder / "class0" / "00000.bin"
    victim.write_bytes(b"1" * 100)
    before = bf.open_dataset(folder, cache=cache)
    assert before[0]["bin"] == b"1" * 100
    victim.write_bytes(b"2" * 100)
    assert bf.open_dataset(folder, cache=cache)[0]["bin"] == b"2" * 100
    uncached = bf.open_dataset(folder, cache=None)
    victim.write_bytes(b"3" * 100)
    with pytest.raises(bf.errors.ObjectChangedError, match=r"00000\.bin"):
        uncached[0]


def test_the_index_lies_where_the_user_says_and_is_used_again(tmp_path: Path):
    folder = write_tars(tmp_path / "t", 10)
    path = tmp_path / "kept.idx"
    first = bf.open_dataset(folder, cache=None, index=path)
    written = path.stat().st_mtime_ns
    again = bf.open_dataset(folder, cache=None, index=path)
    assert path.stat().st_mtime_ns == written
    assert [s["__key__"] for s in again] == [s["__key__"] for s in first]
    assert bf.open_dataset(folder, cache=None, index=first.index)[3] == first[3]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"decode": 3}, "decode must be"),
        ({"cache": "/tmp/x"}, "bucketfeed.DiskCache"),
        ({"format": "parquetish"}, "parquetish"),
    ],
)
def test_bad_arguments_are_named(tmp_path: Path, arguments: dict, text: str):
    write_raw(tmp_path, 2)
    with pytest.raises(bf.errors.ConfigError, match=text):
        bf.open_dataset(tmp_path, **{"cache": None, **arguments})


@pytest.mark.parametrize(
    ("url", "text"),
    [("nosuch://bucket/x", "nosuch"), ("memory://nothing/here/", "nothing/here"), ("no/such/folder", "no/such/folder")],
)
def test_a_url_without_data_is_named(url: str, text: str):
    with pytest.raises((bf.errors.NotFoundError, bf.errors.ConfigError), match=text):
        bf.open_dataset(url, cache=None)
