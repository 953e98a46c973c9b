"""How one object is written so that it appears whole or not at all, in each kind of store."""

from __future__ import annotations

import contextlib
import logging
import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

from bucketfeed.errors import BucketfeedError
from bucketfeed.store.faults import said_by, write_error
from bucketfeed.store.process import PerProcess
from bucketfeed.store.ranges import Buffer

_log = logging.getLogger(__name__)

T = TypeVar("T")

_PARTIAL = ".partial"
PART_BYTES = 16 << 20  # of a multipart upload; S3 wants 5 MiB at least
_PARTS_AHEAD = 3  # of one object, being uploaded while the next is filled
_PARTS_OF_A_SIZE = 1000  # then parts get twice as large: S3 takes 10,000 and 5 TiB
_THREADS = 16


def partial_name(name: str) -> str:
    """Return what a file is called beside its place while it is written: hidden, so that it is taken for no data."""
    folder, slash, base = name.rpartition("/")
    return f"{folder}{slash}.{base}{_PARTIAL}"


def whole_name(name: str) -> str | None:
    """Return what a file of this name will be called once it is written; None for one that is not being written."""
    folder, slash, base = name.rpartition("/")
    is_partial = base.startswith(".") and base.endswith(_PARTIAL)
    return f"{folder}{slash}{base[1:].removesuffix(_PARTIAL)}" if is_partial else None


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


def step(what: str, call: Callable[[], T]) -> T:
    """Return what `call` does on this machine; its `OSError` becomes one of ours that names the step."""
    try:
        return call()
    except OSError as e:
        raise write_error(e, what) from e


class LocalUpload:
    """A file beside the one it becomes."""

    def __init__(self, path: str) -> None:
        self._path, self._partial = path, partial_name(path)
        step(f"making the folder of {path}", lambda: os.makedirs(os.path.dirname(path), exist_ok=True))
        self._file = step(f"opening {path}", lambda: open(self._partial, "wb", buffering=1 << 20))  # noqa: SIM115

    def write(self, data: Buffer) -> None:
        """Append `data`."""
        step(f"writing {self._path}", lambda: self._file.write(data))

    def commit(self) -> None:
        """Make the object visible."""
        step(f"completing {self._path}", self._publish)

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
        """Leave nothing behind."""
        with contextlib.suppress(OSError):  # a full disk says so again when it is closed
            self._file.close()
        with contextlib.suppress(OSError):
            os.unlink(self._partial)


_pool = PerProcess(lambda: ThreadPoolExecutor(_THREADS, thread_name_prefix="bucketfeed-upload"))


class S3Upload:
    """One request for a small object, a multipart upload for a larger one."""

    def __init__(self, call: Callable[..., Any], bucket: str, key: str, part_bytes: int) -> None:
        self._call, self._where, self._url = call, {"Bucket": bucket, "Key": key}, f"s3://{bucket}/{key}"
        self._part_bytes = part_bytes
        self._rest = bytearray()
        self._id: dict[str, str] = {}
        self._sent: deque[Future[Any]] = deque()
        self._parts: list[dict[str, Any]] = []

    def write(self, data: Buffer) -> None:
        """Append `data`."""
        self._rest += data
        while len(self._rest) >= (size := self._size()):  # all of one size, as some stores want it
            self._send(bytes(memoryview(self._rest)[:size]))
            del self._rest[:size]

    def _size(self) -> int:
        return self._part_bytes << (len(self._parts) + len(self._sent)) // _PARTS_OF_A_SIZE

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
        """Make the object visible."""
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
            if "NoSuchUpload" not in said_by(e) or not self._is_there(s3):
                raise

    def _is_there(self, s3: Any) -> bool:
        with contextlib.suppress(Exception):
            return str(s3.head_object(**self._where)["ETag"]).endswith(f'-{len(self._parts)}"')
        return False

    def abort(self) -> None:
        """Leave nothing behind."""
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


class FsspecUpload:
    """A file of any fsspec file system. In GCS it appears when it is closed; elsewhere it is moved to its name then."""

    def __init__(self, client: PerProcess[Any], url: str, *, in_place: bool) -> None:
        self._client, self._url, self._in_place = client, url, in_place
        self._at = url if in_place else partial_name(url)
        self._file = self._do("opening", self._open)

    def _open(self, files: Any) -> Any:
        path = files._strip_protocol(self._at)
        if not self._in_place:
            files.makedirs(files._parent(path), exist_ok=True)
        return files.open(path, "wb")

    def _do(self, step: str, request: Callable[[Any], T]) -> T:
        """Return what is done once: a file can't be written twice, and file systems have retries of their own."""
        try:
            return request(self._client.get())
        except BucketfeedError:
            raise
        except Exception as e:
            raise write_error(e, f"{step} {self._url}") from e

    def write(self, data: Buffer) -> None:
        """Append `data`."""
        self._do("writing", lambda _: self._file.write(data))

    def commit(self) -> None:
        """Make the object visible."""
        self._do("completing", self._publish)

    def _publish(self, files: Any) -> None:
        self._file.close()
        if not self._in_place:
            files.mv(files._strip_protocol(self._at), files._strip_protocol(self._url))

    def abort(self) -> None:
        """Leave nothing behind."""
        with contextlib.suppress(Exception):
            if self._in_place:
                self._file.closed = True  # else it would be completed when it is collected
                self._file.discard()
            else:
                self._file.close()
                files = self._client.get()
                files.rm_file(files._strip_protocol(self._at))
