"""Writes objects, each of which appears whole or not at all: multipart uploads to S3, renames everywhere else."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from bucketfeed.store.access import bucket_access
from bucketfeed.store.faults import said_by, write_error
from bucketfeed.store.fsspec import open_filesystem
from bucketfeed.store.listing import Listed, list_objects
from bucketfeed.store.process import PerProcess
from bucketfeed.store.ranges import Counter
from bucketfeed.store.retry import Retry
from bucketfeed.store.s3 import S3Access
from bucketfeed.store.uploads import PART_BYTES, FsspecUpload, LocalUpload, S3Upload, Upload, whole_name
from bucketfeed.store.urls import parse_url

_log = logging.getLogger(__name__)

T = TypeVar("T")


class Writer:
    """Writes objects under one URL. Pickles; clients are made anew in each process.

    One run writes to a place at a time.

    Raises `AccessError`, `NotFoundError` or `WriteError`, which name URL and step.

    >>> writer = Writer("s3://bucket/prefix/")
    >>> with writer.open("a.bin") as upload:
    ...     upload.write(data)
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        storage_options: Mapping[str, Any] | None = None,
        *,
        part_bytes: int = PART_BYTES,
    ) -> None:
        parsed = parse_url(url)
        self._root = parsed._replace(key=f"{parsed.key.rstrip('/')}/" if parsed.key.strip("/") else parsed.key)
        self._options = dict(storage_options or {})
        self._part_bytes = part_bytes
        access = bucket_access(parsed.scheme, self._options)
        self._s3 = access if isinstance(access, S3Access) else None
        protocol, options = access.fsspec() if access else (parsed.scheme, self._options)
        self._client: PerProcess[Any] = PerProcess(
            access.client if isinstance(access, S3Access) else functools.partial(_filesystem, protocol, options)
        )

    @property
    def url(self) -> str:
        """Where objects go; ends with "/"."""
        return str(self._root)

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[Upload]:
        """Give the object called `name` to write to; visible when the block ends, and not at all where it raises."""
        upload = self._upload(name)
        try:
            yield upload
            upload.commit()
        except BaseException:
            upload.abort()
            raise

    def put(self, name: str, data: bytes) -> None:
        """Write `data` as the object called `name`, in place of one that is there."""
        with self.open(name) as upload:
            upload.write(data)

    def delete(self, names: Iterable[str]) -> None:
        """Remove the objects called so; those that are not there are gone already."""
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                self.call(f"removing {self.url}{name}", functools.partial(self._remove, self._root.key + name))

    def _remove(self, key: str, client: Any) -> None:
        if self._root.scheme == "file":
            os.unlink(key)
        elif self._s3 is not None:
            client.delete_object(Bucket=self._root.bucket, Key=key)
        else:
            client.rm_file(client._strip_protocol(self._root.root + key))

    def listed(self) -> dict[str, Listed]:
        """Return the objects that are there by name, folders beneath included; none where there is no such place."""
        try:
            found = {one.key[len(self._root.key) :]: one for one in list_objects(self._root, self._options)}
        except FileNotFoundError:
            if self._s3 is not None:  # the bucket
                raise
            return {}
        return found

    def sweep(self, ours: Callable[[str], bool]) -> None:
        """Remove what writes that were killed have left of objects whose names are `ours`."""
        self.delete([name for name in self.listed() if (whole := whole_name(name)) is not None and ours(whole)])
        if self._s3 is None:
            return
        bucket, prefix = self._root.bucket, self._root.key
        try:
            pages = self._client.get().get_paginator("list_multipart_uploads").paginate(Bucket=bucket, Prefix=prefix)
            for upload in [upload for page in pages for upload in page.get("Uploads", [])]:
                if ours(upload["Key"][len(prefix) :]):
                    self._client.get().abort_multipart_upload(
                        Bucket=bucket, Key=upload["Key"], UploadId=upload["UploadId"]
                    )
        except Exception as e:  # who may write need not be allowed to list
            _log.warning(
                "uploads to %s that an interrupted run may have left can't be ended: %s; a lifecycle rule "
                "(AbortIncompleteMultipartUpload) does it",
                self.url,
                said_by(e),
            )

    def call(self, what: str, request: Callable[[Any], T]) -> T:
        """Return what `request` makes of this process's client, tried again where that may help."""
        return Retry().call(
            lambda: request(self._client.get()), what, Counter(), renew=self._client.forget, told=write_error
        )

    def _upload(self, name: str) -> Upload:
        if self._root.scheme == "file":
            return LocalUpload(self._root.key + name)
        if self._s3 is not None:
            return S3Upload(self.call, self._root.bucket, self._root.key + name, self._part_bytes)
        return FsspecUpload(self._client, self.url + name, in_place=self._root.scheme == "gs")

    def __reduce__(self) -> tuple[Callable[..., Writer], tuple[Any, ...]]:
        return _writer, (self.url, self._options, self._part_bytes)

    def __repr__(self) -> str:
        return f"Writer({self.url!r})"


def _writer(url: str, options: dict[str, Any], part_bytes: int) -> Writer:
    return Writer(url, options, part_bytes=part_bytes)


def _filesystem(protocol: str, options: Mapping[str, Any]) -> Any:
    files = open_filesystem(protocol, options)
    if (
        protocol == "gs"
    ):  # whose own tries were left to our rule for reading, which can't write a half-written file anew
        files.__dict__.pop("_request", None)
    return files
