"""Each kind of store: the same bytes, whole or not there, nothing left behind, and errors that name URL and step."""

from __future__ import annotations

import os
import pickle
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from packed import contents, opened, photos

import bucketfeed as bf
from bucketfeed.errors import NotFoundError, WriteError
from bucketfeed.store.faults import write_error
from bucketfeed.store.ranges import Counter
from bucketfeed.store.retry import Retry
from bucketfeed.store.uploads import S3Upload
from bucketfeed.store.writing import Writer
from bucketfeed.testing.moto import MotoBucket

MIB = 1 << 20


def test_buckets_get_the_bytes_that_a_folder_gets(bucket: Any, tmp_path: Path) -> None:
    source = photos(tmp_path / "in")
    url = f"{bucket.url}out/"
    options = {"max_shard_bytes": 30_000, "progress": False}
    bf.write_shards(opened(source), tmp_path / "out", **options)
    written = bf.write_shards(opened(source), url, storage_options=bucket.storage_options, **options)
    back = opened(url, storage_options=bucket.storage_options, cache=None)
    assert back.manifest.total_bytes == written.total_bytes
    reader = bf.open_reader(url, bucket.storage_options)
    bodies = reader.read([back.manifest.range(i) for i in range(len(back.manifest))])
    assert list(map(bytes, bodies)) == list(contents(tmp_path / "out").values())
    assert back[7] == opened(tmp_path / "out")[7]
    assert back.stats().requests <= 2  # the index, and the sample
    assert bf.write_shards(opened(source), url, storage_options=bucket.storage_options, **options).new_shards == 0


def test_any_fsspec_file_system_will_do(tmp_path: Path) -> None:
    samples = [{"__key__": f"{i}", "bin": bytes(100)} for i in range(50)]
    bf.write_shards(samples, "memory://shards/out", max_shard_bytes=20_000, progress=False)
    assert list(opened("memory://shards/out", cache=None)) == samples
    assert [name for name in Writer("memory://shards/out").listed() if "partial" in name] == []


def test_a_large_object_goes_up_in_parts(moto_bucket: MotoBucket) -> None:
    data = os.urandom(12 * MIB + 5)
    writer = pickle.loads(pickle.dumps(Writer(moto_bucket.url, moto_bucket.storage_options, part_bytes=5 * MIB)))
    with writer.open("large.bin") as upload:
        for at in range(0, len(data), 1_000_003):
            upload.write(data[at : at + 1_000_003])
    found = writer.listed()["large.bin"]
    assert (found.size, found.etag[-3:]) == (len(data), '-3"')
    assert moto_bucket.client.get_object(Bucket=moto_bucket.name, Key="large.bin")["Body"].read() == data


def uploads_of(bucket: MotoBucket) -> list[str]:
    return [one["Key"] for one in bucket.client.list_multipart_uploads(Bucket=bucket.name).get("Uploads", [])]


def test_an_upload_that_fails_leaves_no_object_and_no_parts(moto_bucket: MotoBucket) -> None:
    writer = Writer(moto_bucket.url, moto_bucket.storage_options, part_bytes=5 * MIB)

    def fail() -> None:
        with writer.open("large.bin") as upload:
            upload.write(bytes(11 * MIB))
            assert uploads_of(moto_bucket) == ["large.bin"]
            raise RuntimeError("as told")

    with pytest.raises(RuntimeError, match="as told"):
        fail()
    assert writer.listed() == {}
    assert uploads_of(moto_bucket) == []


class Lossy:
    """A client that does what it is told, and loses the answer the first time that an upload is completed."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self.tries = 0

    def complete_multipart_upload(self, **asked: Any) -> None:
        self.tries += 1
        self._client.complete_multipart_upload(**asked)
        if self.tries == 1:
            raise ConnectionResetError("the answer is lost")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)


def test_an_upload_whose_last_answer_is_lost_is_complete(moto_bucket: MotoBucket) -> None:
    lossy = Lossy(moto_bucket.client)

    def call(what: str, request: Callable[[Any], Any]) -> Any:
        return Retry(first_seconds=0).call(lambda: request(lossy), what, Counter(), told=write_error)

    upload = S3Upload(call, moto_bucket.name, "a.bin", 5 * MIB)
    upload.write(bytes(6 * MIB))
    upload.commit()
    assert lossy.tries == 2
    assert Writer(moto_bucket.url, moto_bucket.storage_options).listed()["a.bin"].size == 6 * MIB


def test_a_resumed_run_ends_the_broken_uploads_of_its_shards_and_no_others(
    moto_bucket: MotoBucket, tmp_path: Path
) -> None:
    def write() -> Any:
        return bf.write_shards(
            [{"__key__": "a", "txt": "x"}], f"{moto_bucket.url}out/", storage_options=moto_bucket.storage_options
        )

    write()
    for key in ("out/shard-000009.tar", "out/mine.tar", "other/shard-000009.tar"):
        moto_bucket.client.create_multipart_upload(Bucket=moto_bucket.name, Key=key)
    assert write().new_shards == 0
    assert sorted(uploads_of(moto_bucket)) == ["other/shard-000009.tar", "out/mine.tar"]


def test_a_bucket_that_is_missing_is_named(moto_bucket: MotoBucket) -> None:
    with pytest.raises(NotFoundError, match="s3://no-such-bucket-here/"):
        bf.write_shards(
            [{"__key__": "a", "txt": "x"}], "s3://no-such-bucket-here/x", storage_options=moto_bucket.storage_options
        )
    with pytest.raises(NotFoundError, match=r"writing s3://no-such-bucket-here/a\.bin"):
        Writer("s3://no-such-bucket-here/", moto_bucket.storage_options).put("a.bin", b"x")


def test_a_folder_that_can_not_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(NotFoundError, match=r"folder of .*file/out/"):
        bf.write_shards([{"__key__": "a", "txt": "x"}], tmp_path / "file" / "out", progress=False)


def limit_files() -> None:
    """Let no file grow beyond 100 kB, as on a disk that is full."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))


def test_a_disk_that_takes_no_more_is_an_error_that_names_shard_and_step(tmp_path: Path) -> None:
    out = tmp_path / "out"
    code = f"""
import bucketfeed as bf
bf.write_shards(
    [{{"__key__": "small", "bin": bytes(50_000)}}, {{"__key__": "large", "bin": bytes(3_000_000)}}],
    {str(out)!r}, max_shard_bytes=60_000, progress=False,
)
"""
    failed = subprocess.run([sys.executable, "-c", code], preexec_fn=limit_files, capture_output=True, text=True)
    assert "WriteError" in failed.stderr
    assert f"{out}/shard-000001.tar failed: OSError: [Errno 27] File too large" in failed.stderr
    assert sorted(path.name for path in out.iterdir()) == ["_bucketfeed.json", "shard-000000.tar"]


def test_write_errors_survive_the_way_out_of_a_worker() -> None:
    error = pickle.loads(pickle.dumps(WriteError("writing s3://b/k failed")))
    assert (str(error), isinstance(error, OSError)) == ("writing s3://b/k failed", True)
