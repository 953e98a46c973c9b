"""Writes objects, each of which appears whole or not at all: multipart uploads to S3, renames everywhere else."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

from bucketfeed.errors import BucketfeedError
from bucketfeed.store.access import bucket_access
from bucketfeed.store.faults import Fault, fault_of, said_by, write_error
from bucketfeed.store.fsspec import open_filesystem
from bucketfeed.store.listing import Listed, list_objects
from bucketfeed.store.process import PerProcess
from bucketfeed.store.ranges import Buffer, Counter
from bucketfeed.store.retry import Retry
from bucketfeed.store.s3 import S3Access
from bucketfeed.store.urls import parse_url

_log = logging.getLogger(__name__)

T = TypeVar("T")

PARTIAL = ".partial"  # ends the names of files that are being written
_PART_BYTES = 16 << 20  # S3 wants 5 MiB at least
_PARTS_AHEAD = 3  # of one object, being uploaded while the next is filled
_PARTS_OF_A_SIZE = 1000  # then parts get twice as large: S3 takes 10,000 and 5 TiB
_THREADS = 16


class Upload(Protocol):
    """An object that is being written."""

    def write(self, data: Buffer) -> None:
        """Append `data`."""
        ...

    def commit(self) -> None:
        """Make the object visible."""
        ...

    def abort(self) -> None:
        """Leave nothing behind; called after a failure, also one of `commit`."""
        ...


class Writer:
    """Writes objects under one URL. Pickles; clients are made anew in each process. One run writes to a place at a time.

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
        part_bytes: int = _PART_BYTES,
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
            url, key = self.url + name, self._root.key + name
            with contextlib.suppress(FileNotFoundError):
                if self._root.scheme == "file":
                    _step(f"removing {url}", lambda key=key: os.unlink(key))  # type: ignore[misc]
                elif self._s3 is not None:
                    self.call(f"removing {url}", lambda c, key=key: c.delete_object(Bucket=self._root.bucket, Key=key))
                else:
                    self.call(f"removing {url}", lambda files, url=url: files.rm_file(files._strip_protocol(url)))

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
        self.delete([name for name in self.listed() if name.endswith(PARTIAL) and ours(name.removesuffix(PARTIAL))])
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
            return _LocalUpload(self._root.key + name)
        if self._s3 is not None:
            return _S3Upload(self, self._root.bucket, self._root.key + name, self._part_bytes)
        return _FsspecUpload(self, self.url + name, in_place=self._root.scheme == "gs")

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


def _step(what: str, call: Callable[[], T]) -> T:
    try:
        return call()
    except OSError as e:
        raise write_error(e, what) from e


class _LocalUpload:
    """A file beside the one it becomes."""

    def __init__(self, path: str) -> None:
        self._path, self._partial = path, path + PARTIAL
        _step(f"making the folder of {path}", lambda: os.makedirs(os.path.dirname(path), exist_ok=True))
        self._file = _step(f"opening {path}", lambda: open(self._partial, "wb", buffering=1 << 20))  # noqa: SIM115

    def write(self, data: Buffer) -> None:
        _step(f"writing {self._path}", lambda: self._file.write(data))

    def commit(self) -> None:
        _step(f"completing {self._path}", self._publish)

    def _publish(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        os.replace(self._partial, self._path)
        folder = os.open(os.path.dirname(self._path), os.O_RDONLY)
        try:
            os.fsync(folder)  # the name too must outlive a power cut before a journal counts on it
        finally:
            os.close(folder)

    def abort(self) -> None:
        with contextlib.suppress(OSError):  # a full disk says so again when it is closed
            self._file.close()
        with contextlib.suppress(OSError):
            os.unlink(self._partial)


_pool = PerProcess(lambda: ThreadPoolExecutor(_THREADS, thread_name_prefix="bucketfeed-upload"))


class _S3Upload:
    """One request for a small object, a multipart upload for a larger one."""

    def __init__(self, writer: Writer, bucket: str, key: str, part_bytes: int) -> None:
        self._call, self._where, self._url = writer.call, {"Bucket": bucket, "Key": key}, f"s3://{bucket}/{key}"
        self._part_bytes = part_bytes
        self._rest = bytearray()
        self._id: dict[str, str] = {}
        self._sent: deque[Future[Any]] = deque()
        self._parts: list[dict[str, Any]] = []

    def write(self, data: Buffer) -> None:
        self._rest += data
        number = len(self._parts) + len(self._sent)
        size = self._part_bytes << number // _PARTS_OF_A_SIZE
        if len(self._rest) >= size:
            self._send(bytes(self._rest))
            self._rest.clear()

    def _send(self, body: bytes) -> None:
        if not self._id:
            reply = self._call(
                f"beginning the upload of {self._url}", lambda s3: s3.create_multipart_upload(**self._where)
            )
            self._id = {"UploadId": reply["UploadId"]}
        while len(self._sent) >= _PARTS_AHEAD:
            self._take()
        self._sent.append(_pool.get().submit(self._part, len(self._parts) + len(self._sent) + 1, body))

    def _part(self, number: int, body: bytes) -> dict[str, Any]:
        reply = self._call(
            f"uploading part {number} of {self._url}",
            lambda s3: s3.upload_part(**self._where, **self._id, PartNumber=number, Body=body),
        )
        told = {name: value for name, value in reply.items() if name.startswith("Checksum") and name != "ChecksumType"}
        return {"PartNumber": number, "ETag": reply["ETag"], **told}

    def _take(self) -> None:
        self._parts.append(self._sent[0].result())
        self._sent.popleft()

    def commit(self) -> None:
        body = bytes(self._rest)
        if not self._id:
            self._call(f"writing {self._url}", lambda s3: s3.put_object(**self._where, Body=body))
            return
        if body:
            self._send(body)
        while self._sent:
            self._take()
        self._call(f"completing the upload of {self._url}", self._complete)
        self._id = {}

    def _complete(self, s3: Any) -> None:
        try:
            s3.complete_multipart_upload(**self._where, **self._id, MultipartUpload={"Parts": self._parts})
        except Exception as e:
            # A try before this one may have come through, with its answer lost.
            if fault_of(e) is not Fault.LASTING or "NoSuchUpload" not in said_by(e) or not self._is_there(s3):
                raise

    def _is_there(self, s3: Any) -> bool:
        with contextlib.suppress(Exception):
            return str(s3.head_object(**self._where)["ETag"]).endswith(f'-{len(self._parts)}"')
        return False

    def abort(self) -> None:
        for future in self._sent:
            future.cancel()
        for future in self._sent:  # a part that arrives after the end of its upload would stay for ever
            if not future.cancelled():
                future.exception()
        if self._id:
            try:
                self._call(
                    f"ending the upload of {self._url}", lambda s3: s3.abort_multipart_upload(**self._where, **self._id)
                )
            except BucketfeedError as e:
                _log.warning("%s", e)


class _FsspecUpload:
    """A file of any fsspec file system. In GCS it appears when it is closed; elsewhere it is moved to its name then."""

    def __init__(self, writer: Writer, url: str, *, in_place: bool) -> None:
        self._writer, self._url, self._in_place = writer, url, in_place
        self._at = url if in_place else url + PARTIAL
        self._file = self._do("opening", self._open)

    def _open(self, files: Any) -> Any:
        path = files._strip_protocol(self._at)
        if not self._in_place:
            files.makedirs(files._parent(path), exist_ok=True)
        return files.open(path, "wb")

    def _do(self, step: str, request: Callable[[Any], T]) -> T:
        """Return what is done once: a file can't be written twice, and file systems have retries of their own."""
        try:
            return request(self._writer._client.get())
        except BucketfeedError:
            raise
        except Exception as e:
            raise write_error(e, f"{step} {self._url}") from e

    def write(self, data: Buffer) -> None:
        self._do("writing", lambda _: self._file.write(data))

    def commit(self) -> None:
        self._do("completing", self._publish)

    def _publish(self, files: Any) -> None:
        self._file.close()
        if not self._in_place:
            files.mv(files._strip_protocol(self._at), files._strip_protocol(self._url))

    def abort(self) -> None:
        with contextlib.suppress(Exception):
            if self._in_place:
                self._file.closed = True  # else it would be completed when it is collected
                self._file.discard()
            else:
                self._file.close()
                files = self._writer._client.get()
                files.rm_file(files._strip_protocol(self._at))
