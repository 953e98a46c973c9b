from __future__ import annotations

import multiprocessing
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from reader_contract import DATA, Place, ReaderContract

from bucketfeed.errors import AccessError, ConfigError, NotFoundError, ReadError
from bucketfeed.store.fsspec import FsspecReader, version_token
from bucketfeed.store.local import LocalReader, file_version
from bucketfeed.store.obstore import ObstoreReader
from bucketfeed.store.ranges import Range
from bucketfeed.store.readers import open_reader
from bucketfeed.store.s3 import S3Access
from bucketfeed.testing.gcs import GcsBucket
from bucketfeed.testing.moto import MotoBucket
from bucketfeed.testing.readers import MemoryReader


class TestMemoryReader(ReaderContract):
    @pytest.fixture
    def place(self) -> Place:
        reader = MemoryReader({})

        def put(key: str, data: bytes) -> tuple[str, str]:
            reader.objects[f"memory://{key}"] = data, f"v{len(reader.objects)}-{uuid.uuid4().hex}"
            return f"memory://{key}", reader.objects[f"memory://{key}"][1]

        return Place(reader, put)


class TestLocalReader(ReaderContract):
    @pytest.fixture
    def place(self, tmp_path: Path) -> Place:
        def put(key: str, data: bytes) -> tuple[str, str]:
            path = tmp_path / key
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(data)
            return f"file://{path}", file_version(path.stat())

        return Place(LocalReader(), put)


class TestFsspecReaderOnMemory(ReaderContract):
    @pytest.fixture
    def place(self) -> Place:
        files, folder = fsspec.filesystem("memory"), uuid.uuid4().hex

        def put(key: str, data: bytes) -> tuple[str, str]:
            files.pipe_file(f"/{folder}/{key}", data)
            return f"memory://{folder}/{key}", version_token(files.info(f"/{folder}/{key}"))

        return Place(FsspecReader("memory", {}), put)


class TestObstoreReaderOnS3(ReaderContract):
    @pytest.fixture
    def place(self, moto_bucket: MotoBucket) -> Place:
        reader = open_reader(moto_bucket.url, moto_bucket.storage_options)
        assert isinstance(reader, ObstoreReader)
        return Place(reader, lambda key, data: (moto_bucket.url + key, moto_bucket.put(key, data)))

    def test_requests_are_merged_and_counted(self, place: Place):
        url, etag = place.put("a.bin", DATA)
        before = place.reader.counter.counts()
        place.reader.read([Range(url, start, start + 1000, etag) for start in range(0, 50_000, 1000)])
        cost = place.reader.counter.counts() - before
        assert (cost.requests, cost.bytes_fetched) == (1, 50_000)


class TestFsspecReaderOnS3(ReaderContract):
    @pytest.fixture
    def place(self, moto_bucket: MotoBucket) -> Place:
        access = S3Access.from_options(moto_bucket.storage_options).resolved(moto_bucket.name)
        reader = FsspecReader(*access.fsspec())
        return Place(reader, lambda key, data: (moto_bucket.url + key, moto_bucket.put(key, data)))


class TestObstoreReaderOnGcs(ReaderContract):
    @pytest.fixture
    def place(self, gcs_bucket: GcsBucket) -> Place:
        reader = open_reader(gcs_bucket.url, gcs_bucket.storage_options)
        assert isinstance(reader, ObstoreReader)
        return Place(reader, lambda key, data: (gcs_bucket.url + key, gcs_bucket.put(key, data)))


class TestFsspecReaderOnGcs(ReaderContract):
    @pytest.fixture
    def place(self, gcs_bucket: GcsBucket) -> Place:
        reader = FsspecReader("gs", gcs_bucket.storage_options)
        return Place(reader, lambda key, data: (gcs_bucket.url + key, gcs_bucket.put(key, data)))


def read_and_send(reader, ranges: list[Range], connection) -> None:
    connection.send([bytes(b) for b in reader.read(ranges)])


@pytest.mark.parametrize("start_method", ["fork", "forkserver", "spawn"])
@pytest.mark.parametrize("kind", ["obstore", "fsspec"])
def test_a_reader_used_before_works_in_a_child_of_every_start_method_c014(bucket, start_method: str, kind: str):
    ranges = [Range(f"{bucket.url}{n}", 0, 5, bucket.put(str(n), b"bytes")) for n in range(3)]
    reader = open_reader(bucket.url, bucket.storage_options)
    if kind == "fsspec":
        reader = reader._other
    assert reader.read(ranges) == [b"bytes"] * 3
    context = multiprocessing.get_context(start_method)
    ours, theirs = context.Pipe()
    child = context.Process(target=read_and_send, args=(reader, ranges, theirs))
    child.start()
    assert ours.poll(60), f"a {start_method} child hangs"
    assert ours.recv() == [b"bytes"] * 3
    child.join(60)
    assert child.exitcode == 0


@pytest.mark.parametrize("start_method", ["fork", "forkserver", "spawn"])
def test_children_started_in_the_middle_of_a_prefetch_read_on_c014(bucket, start_method: str):
    ranges = [Range(f"{bucket.url}{n}", 0, 5, bucket.put(str(n), b"bytes")) for n in range(3)]
    reader = open_reader(bucket.url, bucket.storage_options)
    running, stop = threading.Event(), threading.Event()

    def prefetch() -> None:
        while not stop.is_set():
            reader.read(ranges)
            running.set()

    threads = [threading.Thread(target=prefetch) for _ in range(2)]
    context = multiprocessing.get_context(start_method)
    try:
        for thread in threads:
            thread.start()
        assert running.wait(30)
        children = []
        for _ in range(4):
            ours, theirs = context.Pipe()
            child = context.Process(target=read_and_send, args=(reader, ranges, theirs), daemon=True)
            child.start()
            children.append((child, ours))
        for child, ours in children:
            assert ours.poll(60), f"a {start_method} child hangs"
            assert ours.recv() == [b"bytes"] * 3
            child.join(60)
            assert child.exitcode == 0
    finally:
        stop.set()
        for thread in threads:
            thread.join(60)


def test_the_endpoint_and_keys_come_from_the_environment_as_well(
    moto_bucket: MotoBucket, monkeypatch: pytest.MonkeyPatch
):
    etag = moto_bucket.put("a", b"abc")
    for name, value in moto_bucket.server.environment.items():
        monkeypatch.setenv(name, value)
    reader = open_reader(moto_bucket.url)
    for one in (reader, reader._other):
        assert one.read([Range(moto_bucket.url + "a", 0, 3, etag)]) == [b"abc"]


def test_a_profile_names_endpoint_and_keys(moto_bucket: MotoBucket, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    etag = moto_bucket.put("a", b"abc")
    config = tmp_path / "config"
    config.write_text(
        f"[profile lab]\nregion = eu-west-1\nendpoint_url = {moto_bucket.server.endpoint_url}\n"
        "aws_access_key_id = testing\naws_secret_access_key = testing\n"
    )
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    reader = open_reader(moto_bucket.url, {"profile": "lab"})
    for one in (reader, reader._other):
        assert one.read([Range(moto_bucket.url + "a", 0, 3, etag)]) == [b"abc"]
    with pytest.raises(ConfigError, match="nobody"):
        open_reader(moto_bucket.url, {"profile": "nobody"})


def test_anonymous_and_requester_pays_reach_every_client(moto_bucket: MotoBucket):
    etag = moto_bucket.put("a", b"abc", ACL="public-read")
    options = {"anon": True, "requester_pays": True, "endpoint_url": moto_bucket.server.endpoint_url}
    reader = open_reader(moto_bucket.url, options)
    for one in (reader, reader._other):
        assert one.read([Range(moto_bucket.url + "a", 0, 3, etag)]) == [b"abc"]
    moto_bucket.put("private", b"abc")
    for one in (reader, reader._other):
        with pytest.raises(AccessError, match="private"):
            one.read([Range(moto_bucket.url + "private", 0, 3)])


def test_without_credentials_the_error_names_the_ways_to_give_them(
    moto_bucket: MotoBucket, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    reader = open_reader(moto_bucket.url, {"endpoint_url": moto_bucket.server.endpoint_url})
    with pytest.raises(AccessError, match=r"anon.*True"):
        reader.read([Range(moto_bucket.url + "a", 0, 3)])


def test_secrets_stay_out_of_reprs(moto_bucket: MotoBucket):
    reader = open_reader(moto_bucket.url, {"key": "AKIAX", "secret": "s3cr3t", "token": "t0k3n"})
    assert not any(word in repr(reader) for word in ("s3cr3t", "t0k3n", "AKIAX"))


@pytest.mark.parametrize(
    ("url", "options", "text"),
    [
        ("nosuch://a/b", {}, "nosuch"),
        ("", {}, "empty"),
        ("s3://", {}, "no bucket"),
        ("s3://no bucket/x", {}, "'no bucket'"),
        ("s3://bucket/", {"keey": "a"}, "keey"),
        ("s3://bucket/", {"key": "a"}, "both 'key' and 'secret'"),
    ],
)
def test_bad_urls_and_options_are_named(url: str, options: dict, text: str):
    with pytest.raises(ConfigError, match=text):
        open_reader(url, options)


def test_a_store_that_is_not_there_ends_in_an_error_with_the_tries(monkeypatch: pytest.MonkeyPatch):
    from bucketfeed.store import fetching
    from bucketfeed.store.retry import Retry

    reader = open_reader("s3://bucket/", {"endpoint_url": "http://127.0.0.1:9", "key": "a", "secret": "b"})
    policy = Retry(max_tries=3, first_seconds=0.01)
    for one in (reader, reader._other):
        fetch = one._fetch if isinstance(one, ObstoreReader) else one._fetch_s3
        with pytest.raises(ReadError, match=r"s3://bucket/a \[0:3\] failed after 3 tries"):
            fetching.read_planned([Range("s3://bucket/a", 0, 3)], fetch, one.counter, retry=policy)
    assert reader.counter.counts().retries == 4


def test_a_missing_bucket_is_named(moto_bucket: MotoBucket):
    reader = open_reader("s3://no-such-bucket-here/", moto_bucket.storage_options)
    with pytest.raises(NotFoundError, match="no-such-bucket-here"):
        reader.read([Range("s3://no-such-bucket-here/a", 0, 3)])


class _Counted(S3Access):
    made: ClassVar[list[str]] = []

    def obstore(self, bucket: str) -> Any:
        self.made.append(bucket)
        return super().obstore(bucket)


def test_threads_that_ask_at_once_share_one_client(moto_bucket: MotoBucket):
    url = moto_bucket.url + "a.bin"
    etag = moto_bucket.put("a.bin", bytes(range(256)))
    reader = ObstoreReader(_Counted.from_options(moto_bucket.storage_options).resolved(moto_bucket.name))
    ranges = [Range(url, start, start + 1, etag) for start in range(0, 256, 8)]
    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(lambda r: bytes(reader.read([r])[0]), ranges)) == [bytes([r.start]) for r in ranges]
    assert _Counted.made == [moto_bucket.name]
