"""Reads ranges through fsspec: every file system that obstore does not serve, and S3 where obstore cannot go."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from bucketfeed.errors import ConfigError
from bucketfeed.store.faults import check_version, raise_if_changed
from bucketfeed.store.fetching import read_planned
from bucketfeed.store.gcs import GcsAccess, media_url
from bucketfeed.store.process import PerProcess
from bucketfeed.store.ranges import Buffer, Counter, Range
from bucketfeed.store.urls import parse_url

# What file systems call the version of a file, best first; gcsfs tells an etag too, which may outlive the bytes.
_VERSION_FIELDS = ("generation", "ETag", "etag", "e_tag", "md5", "version_id", "mtime", "modified", "created")


def open_filesystem(protocol: str, options: Mapping[str, Any]) -> Any:
    """Return a new fsspec file system, never one that another process or thread has used.

    Raises `ConfigError` for a protocol that is unknown or whose package is missing, and for bad options.
    """
    import fsspec

    try:
        if protocol == "gs":
            return GcsAccess.from_options(options).filesystem()
        return fsspec.filesystem(protocol, skip_instance_cache=True, **options)
    except ImportError as e:
        raise ConfigError(f"{protocol}:// needs another package: {e}") from e
    except (ValueError, TypeError) as e:
        raise ConfigError(f"{protocol}:// can't be opened: {e}; check the URL's scheme and storage_options") from e


def version_token(info: Mapping[str, Any]) -> str:
    """Return what names the version of a file in fsspec's `info`, or "" where the file system tells nothing."""
    for name in _VERSION_FIELDS:
        value = info.get(name)
        if value is not None:
            # One and the same time is a number in a listing and a datetime in `info` of the memory file system.
            return str(value.timestamp() if isinstance(value, datetime) else value)
    return ""


class FsspecReader:
    """A `RangeReader` of any fsspec file system, made anew in each process.

    Elsewhere than in S3 and GCS the version is checked after the read: bytes of another one are never returned.
    """

    is_local = False

    def __init__(self, protocol: str, options: Mapping[str, Any], *, counter: Counter | None = None) -> None:
        self.counter = counter or Counter()
        self._protocol = protocol
        self._options = dict(options)
        self._files: PerProcess[Any] = PerProcess(functools.partial(open_filesystem, protocol, self._options))

    def read(self, ranges: Sequence[Range]) -> list[Buffer]:
        """Return the bytes of each range; see `RangeReader.read`."""
        fetch = {"s3": self._fetch_s3, "gs": self._fetch_gs}.get(self._protocol, self._fetch)
        return read_planned(ranges, fetch, self.counter, renew=self._files.forget)

    def _fetch(self, range: Range) -> Buffer:
        files = self._files.get()
        path = files._strip_protocol(range.url)
        body: bytes = files.cat_file(path, start=range.start, end=range.stop)
        if range.etag:
            files.invalidate_cache(files._parent(path))
            check_version(range, version_token(files.info(path)))
        return body

    def _fetch_s3(self, range: Range) -> Buffer:
        """Read with If-Match and the exact key: `cat_file` knows no versions and takes "?versionId=" for one."""
        import fsspec.asyn

        files = self._files.get()
        files.retries = 1
        _, bucket, key = parse_url(range.url)
        asked = {"Bucket": bucket, "Key": key, "Range": f"bytes={range.start}-{range.stop - 1}", **files.req_kw}
        if range.etag:
            asked["IfMatch"] = range.etag

        async def get() -> bytes:
            reply = await files._call_s3("get_object", **asked)
            async with reply["Body"] as body:
                check_version(range, reply["ETag"])
                return await body.read()  # type: ignore[no-any-return]

        async def version() -> str:
            return str((await files._call_s3("head_object", Bucket=bucket, Key=key, **files.req_kw))["ETag"])

        try:
            return fsspec.asyn.sync(files.loop, get)  # type: ignore[no-any-return]
        except Exception as e:
            raise_if_changed(e, range, lambda: str(fsspec.asyn.sync(files.loop, version)))
            raise

    def _fetch_gs(self, range: Range) -> Buffer:
        """Read the generation asked for, of the exact key: `cat_file` drops a final "/" and knows no generation."""
        files = self._files.get()
        _, bucket, key = parse_url(range.url)
        address = media_url(files, bucket, key, range.etag)
        try:
            headers, body = files.call("GET", address, headers={"Range": f"bytes={range.start}-{range.stop - 1}"})
            check_version(range, headers.get("x-goog-generation", range.etag))
            return body  # type: ignore[no-any-return]
        except Exception as e:
            about = functools.partial(files.call, "GET", "b/{}/o/{}", bucket, key, json_out=True)
            raise_if_changed(e, range, lambda: str(about()["generation"]))
            raise

    def __reduce__(self) -> tuple[type[FsspecReader], tuple[str, dict[str, Any]]]:
        return type(self), (self._protocol, self._options)

    def __repr__(self) -> str:
        return f"FsspecReader({self._protocol!r})"
