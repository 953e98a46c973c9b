from __future__ import annotations

import gc
import os
import pickle
import shutil
from pathlib import Path

import fsspec
import pytest

from bucketfeed.errors import AccessError, CacheError, ConfigError, NotFoundError
from bucketfeed.store.manifest import Manifest
from bucketfeed.store.ranges import Range
from bucketfeed.store.readers import open_reader
from bucketfeed.store.s3 import S3Access
from bucketfeed.testing.moto import MotoBucket

ODD_KEYS = [
    "k18/pic #1.jpg",
    "k18/what?.jpg",
    "k18/a#b?c=1&d=2.bin",
    "k18/x?versionId=null",
    "k18/#",
    "k18/100%25 + more.bin",
    "k20/x.bin",
    "k20//x.bin",
    "k20/a///b.bin",
    "/k20-lead.bin",
    "k20/./dot.bin",
    "k20/../up.bin",
    "k21/empty.bin",
    "k21/p",
    "k21/p/b.bin",
    "k23/caf\u00e9.bin",
    "k23/cafe\u0301.bin",
    "k23/日本語 データ.bin",
    "k23/😀.bin",
    "k23/A.bin",
    "k23/a.bin",
    "k23/" + "long" * 254 + ".b",
    "odd/a\x01\tb\x7f.bin",
    "odd/{}|\\^[]<>`~*'\"&=;:,@$!().bin",
]


@pytest.fixture
def odd_bucket(bucket):
    for key in ODD_KEYS:
        bucket.put(key, b"" if key == "k21/empty.bin" else f"bytes of {key}".encode())
    for marker in ("k21/", "k21/sub/"):
        bucket.put(marker, b"")
    bucket.put("k21/full/", b"bytes of k21/full/")
    return bucket


def test_every_key_is_listed_as_it_is_and_read_from_listing_and_by_url_c018_c020_c021_c023(odd_bucket):
    manifest = Manifest.from_url(odd_bucket.url, storage_options=odd_bucket.storage_options)
    keys = [manifest.key(i) for i in range(len(manifest))]
    assert keys == sorted([*ODD_KEYS, "k21/full/"], key=str.encode)
    reader = open_reader(odd_bucket.url, odd_bucket.storage_options)
    bodies = reader.read([manifest.range(i) for i in range(len(manifest))])
    assert {key: bytes(body) for key, body in zip(keys, bodies, strict=True)} == {
        key: b"" if key == "k21/empty.bin" else f"bytes of {key}".encode() for key in keys
    }
    for key in ODD_KEYS:
        one = Manifest.from_url(odd_bucket.url + key, storage_options=odd_bucket.storage_options)
        assert [one.object_url(0)] == list(one) == [odd_bucket.url + key]
        assert bytes(reader.read([one.range(0)])[0]) == (b"" if "empty" in key else f"bytes of {key}".encode())


@pytest.fixture
def small_pages(moto_bucket: MotoBucket, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Make listings come in pages of ten, and note what is asked for each."""
    pages: list[str] = []
    client = S3Access.from_options(moto_bucket.storage_options).client()

    def cut(params, **_):
        pages.append(params["Prefix"])
        return {**params, "MaxKeys": 10}

    client.meta.events.register("provide-client-params.s3.ListObjectsV2", cut)
    monkeypatch.setattr(S3Access, "client", lambda _: client)
    return pages


def test_many_pages_and_folders_are_listed_whole(small_pages: list[str], moto_bucket: MotoBucket):
    keys = {f"train/{n % 3}/{n:05}" for n in range(105)} | {"train/top"}
    for key in keys:
        moto_bucket.put(key, b"x")
    moto_bucket.put("trainer/other", b"x")
    manifest = Manifest.from_url(moto_bucket.url + "train", storage_options=moto_bucket.storage_options)
    assert {"train/" + manifest.key(i) for i in range(len(manifest))} == keys
    assert manifest.total_bytes == 106
    assert len(small_pages) > 10


def test_a_new_manifest_sees_the_present_and_an_old_one_keeps_its_list_c024(bucket):
    bucket.put("a", b"1")
    bucket.put("b", b"2")
    before = Manifest.from_url(bucket.url, storage_options=bucket.storage_options)
    bucket.put("c", b"3")
    bucket.delete("a")
    after = Manifest.from_url(bucket.url, storage_options=bucket.storage_options)
    assert [m.key(i) for m in (before, after) for i in range(len(m))] == ["a", "b", "b", "c"]
    assert before.fingerprint != after.fingerprint
    reader = open_reader(bucket.url, bucket.storage_options)
    with pytest.raises(NotFoundError, match=f"{bucket.url}a"):
        reader.read([before.range(0)])


def test_archived_objects_are_refused_by_name_and_instant_retrieval_is_read_c036(moto_bucket: MotoBucket):
    moto_bucket.put("fine/instant", b"x", StorageClass="GLACIER_IR")
    moto_bucket.put("cold/deep", b"x", StorageClass="DEEP_ARCHIVE")
    for n in range(5):
        moto_bucket.put(f"fine/{n}", b"x")
    fine = Manifest.from_url(moto_bucket.url + "fine/", storage_options=moto_bucket.storage_options)
    assert len(fine) == 6
    for url in ("", "cold/", "cold/deep"):
        with pytest.raises(AccessError, match=r"cold/deep.*DEEP_ARCHIVE.*restore"):
            Manifest.from_url(moto_bucket.url + url, storage_options=moto_bucket.storage_options)


def test_an_object_archived_after_it_was_listed_is_named_with_its_class_by_both_readers_c036(moto_bucket: MotoBucket):
    moto_bucket.put("a", b"abc", StorageClass="GLACIER")
    reader = open_reader(moto_bucket.url, moto_bucket.storage_options)
    for one in (reader, reader._other):
        with pytest.raises(AccessError, match=f"{moto_bucket.url}a.*archived.*GLACIER"):
            one.read([Range(moto_bucket.url + "a", 0, 3)])


@pytest.mark.parametrize(("folders", "objects", "requests"), [(2, 11, 6), (11, 1, 2), (1, 25, 5)])
def test_full_folders_are_listed_at_the_same_time_and_small_ones_page_by_page(
    small_pages: list[str], moto_bucket: MotoBucket, folders: int, objects: int, requests: int
):
    keys = [f"{folder:05}/{n:05}" for folder in range(folders) for n in range(objects)]
    for key in keys:
        moto_bucket.put(key, b"x")
    manifest = Manifest.from_url(moto_bucket.url, storage_options=moto_bucket.storage_options)
    assert [manifest.key(i) for i in range(len(manifest))] == keys
    assert len(small_pages) == requests


@pytest.mark.parametrize("key", ["", "none/", "none"])
def test_nothing_under_a_prefix_is_named(bucket, key: str):
    with pytest.raises(NotFoundError, match=bucket.url + key):
        Manifest.from_url(bucket.url + key, storage_options=bucket.storage_options)


def test_a_folder_and_its_copy_are_the_same_data_and_a_changed_one_is_not(tmp_path: Path):
    for name in ("b/2", "a/1", "a b#?/3"):
        (tmp_path / "one" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "one" / name).write_bytes(name.encode())
    os.symlink("..", tmp_path / "one" / "a" / "loop")
    first = Manifest.from_url(tmp_path / "one")
    shutil.copytree(tmp_path / "one", tmp_path / "two", symlinks=True)
    assert [first.key(i) for i in range(len(first))] == ["a b#?/3", "a/1", "b/2"]
    assert Manifest.from_url(f"{tmp_path}/two/").fingerprint == first.fingerprint
    (tmp_path / "two" / "b" / "2").write_bytes(b"longer")
    assert Manifest.from_url(tmp_path / "two").fingerprint != first.fingerprint


def test_a_single_file_and_other_file_systems_work_alike(tmp_path: Path):
    (tmp_path / "x.bin").write_bytes(b"abc")
    one = Manifest.from_url(tmp_path / "x.bin")
    assert (one.key(0), one.size(0), one.url) == ("x.bin", 3, f"file://{tmp_path}/")
    fsspec.filesystem("memory").pipe({"/manifest-test/a/1": b"1", "/manifest-test/b": b"22"})
    memory = Manifest.from_url("memory://manifest-test")
    assert list(memory) == ["memory://manifest-test/a/1", "memory://manifest-test/b"]
    reader = open_reader(memory.url)
    assert [bytes(b) for b in reader.read([memory.range(0), memory.range(1)])] == [b"1", b"22"]


def test_it_pickles_as_its_path_and_says_what_it_is(tmp_path: Path):
    objects = [(f"s3://bucket/set/{n:07}.jpg", n, f'"{n:032x}"') for n in range(100_000)]
    manifest = Manifest.from_objects("s3://bucket/set", objects, folder=tmp_path)
    state = pickle.dumps(manifest)
    assert len(state) < 500
    copy = pickle.loads(state)
    assert copy.range(99_999) == manifest.range(99_999)
    assert copy.range(7) == ("s3://bucket/set/0000007.jpg", 0, 7, f'"{7:032x}"')
    assert repr(copy) == "Manifest('s3://bucket/set/', objects=100,000, bytes=4,999,950,000)"
    assert Manifest.open(manifest.path).fingerprint == manifest.fingerprint


def test_numbers_count_from_the_end_as_well_and_end_where_the_objects_do():
    manifest = Manifest.from_objects("s3://b", [("s3://b/x", 1, "1"), ("s3://b/a", 2, "2")])
    assert (manifest.key(0), manifest.key(1), manifest.key(-1), manifest.size(-1)) == ("a", "x", "x", 1)
    with pytest.raises(IndexError):
        manifest.key(2)


def test_objects_from_elsewhere_and_none_at_all_are_refused():
    with pytest.raises(ConfigError, match=r"s3://b/train2/x is not under s3://b/train/"):
        Manifest.from_objects("s3://b/train", [("s3://b/train2/x", 1, "")])
    with pytest.raises(NotFoundError, match="s3://b/train/"):
        Manifest.from_objects("s3://b/train", [])


def leave(manifest: Manifest) -> None:
    path = manifest.path
    del manifest
    gc.collect()
    assert path.exists()


def test_its_file_outlives_a_forked_worker_and_goes_with_its_maker(tmp_path: Path):
    manifest = Manifest.from_objects("s3://b", [("s3://b/x", 1, "1")])
    folder = manifest.path.parent
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            leave(manifest)
            manifest = None
            gc.collect()
            status = 0 if folder.exists() else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert folder.exists()
    del manifest
    gc.collect()
    assert not folder.exists()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"profile": "nobody"}, "nobody"),
        ({"endpoint_url": "localhost:9000"}, "localhost:9000"),
        ({"config_kwargs": {"nonsense": 1}}, "nonsense"),
    ],
)
def test_settings_that_cannot_work_are_named(options: dict, text: str):
    for opened in (
        lambda: Manifest.from_url("s3://b/", storage_options=options),
        lambda: open_reader("s3://b", options),
    ):
        with pytest.raises(ConfigError, match=text):
            opened()


def test_a_file_that_is_no_manifest_is_refused(tmp_path: Path):
    (tmp_path / "x.manifest").write_bytes(b"something else")
    whole = Manifest.from_objects("s3://b", [("s3://b/x", 1, "1")]).path.read_bytes()
    (tmp_path / "cut.manifest").write_bytes(whole[:-1])
    (tmp_path / "cut-more.manifest").write_bytes(whole[:60])
    for name in ("x.manifest", "cut.manifest", "cut-more.manifest", "missing.manifest"):
        with pytest.raises(CacheError, match=name):
            Manifest.open(tmp_path / name)
