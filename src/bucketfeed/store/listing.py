"""Lists what is under a URL: exact keys, sizes, versions."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from bucketfeed.errors import AccessError, BucketfeedError, ReadError
from bucketfeed.store.faults import Fault, fault_of, our_error
from bucketfeed.store.fsspec import open_filesystem, version_token
from bucketfeed.store.local import file_version
from bucketfeed.store.ranges import Counter
from bucketfeed.store.retry import Retry
from bucketfeed.store.s3 import S3Access
from bucketfeed.store.urls import Url

_THREADS = 8
_RETRY = Retry(max_tries=5, total_seconds=30.0)
_ARCHIVED = {"GLACIER", "DEEP_ARCHIVE"}


class Listed(NamedTuple):
    """An object as its store lists it."""

    key: str
    size: int
    etag: str


def find_object(url: Url, storage_options: Mapping[str, Any] | None) -> Listed | None:
    """Return the object whose key is exactly that of `url`, or None."""
    if url.scheme == "file":
        return _local_file(url.key)
    if url.scheme == "s3":
        return _s3_object(url, S3Access.from_options(storage_options))
    files = open_filesystem(url.scheme, storage_options or {})
    try:
        info = files.info(files._strip_protocol(str(url)))
    except Exception as e:
        if fault_of(e) is Fault.MISSING:
            return None
        raise our_error(e, str(url)) from e
    return _listed(url.key, info) if info["type"] == "file" else None


def list_objects(url: Url, storage_options: Mapping[str, Any] | None) -> Iterator[Listed]:
    """Yield every object whose key starts with that of `url` (a prefix), in no particular order.

    Zero-byte keys that end in "/" are folder markers and left out. Raises `AccessError` for archived objects.
    """
    if url.scheme == "file":
        yield from _local_files(url.key)
    elif url.scheme == "s3":
        yield from _s3_objects(url, S3Access.from_options(storage_options))
    else:
        yield from _fsspec_files(url, storage_options)


def _local_file(path: str) -> Listed | None:
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return None
    except OSError as e:
        raise our_error(e, path) from e
    return None if os.path.isdir(path) or path.endswith("/") else Listed(path, status.st_size, file_version(status))


def _local_files(folder: str) -> Iterator[Listed]:
    seen: set[tuple[int, int]] = set()  # a link that leads back up must not go round for ever
    folders = [folder]
    while folders:
        try:
            status = os.stat(folder := folders.pop())
            if (status.st_dev, status.st_ino) in seen:
                continue
            seen.add((status.st_dev, status.st_ino))
            with os.scandir(folder) as entries:
                for entry in entries:
                    if entry.is_dir():
                        folders.append(entry.path)
                    elif entry.is_file():
                        status = entry.stat()
                        yield Listed(entry.path, status.st_size, file_version(status))
        except FileNotFoundError:
            continue
        except OSError as e:
            raise our_error(e, folder) from e


def _fsspec_files(url: Url, storage_options: Mapping[str, Any] | None) -> Iterator[Listed]:
    files = open_filesystem(url.scheme, storage_options or {})
    root = url.root
    try:
        for name, info in files.find(files._strip_protocol(str(url)), detail=True).items():
            full = files.unstrip_protocol(name) if url.bucket else f"{root}{name.lstrip('/')}"
            # The page that stands for a folder of a web server tells no sizes.
            found = _listed(full[len(root) :], files.info(name) if info.get("size") is None else info)
            if found.size or not found.key.endswith("/"):
                yield found
    except BucketfeedError:
        raise
    except Exception as e:
        if fault_of(e) is not Fault.MISSING:
            raise our_error(e, str(url)) from e


def _listed(key: str, info: Mapping[str, Any]) -> Listed:
    if info.get("size") is None:
        raise ReadError(f"{info['name']} tells no size, so no range of it can be read; copy it to a store that does")
    return Listed(key, int(info["size"]), version_token(info))


def _s3_object(url: Url, access: S3Access) -> Listed | None:
    client = access.client()
    payer = {"RequestPayer": "requester"} if access.requester_pays else {}
    if not url.key:
        return None
    try:
        head = _RETRY.call(lambda: client.head_object(Bucket=url.bucket, Key=url.key, **payer), str(url), Counter())
    except BucketfeedError as e:
        # HEAD says no more than 404, or 403 to those who may not list: the listing finds the words.
        if isinstance(e, FileNotFoundError | PermissionError):
            return None
        raise
    found = Listed(url.key, int(head["ContentLength"]), head["ETag"])
    _check_archived([(found.key, head.get("StorageClass"), head.get("Restore"))], url)
    return found


def _s3_objects(url: Url, access: S3Access) -> Iterator[Listed]:
    """List page by page, or full folders beneath `url` at the same time."""
    client = access.client()
    payer = {"RequestPayer": "requester"} if access.requester_pays else {}

    def pages(prefix: str, **more: Any) -> Iterator[dict[str, Any]]:
        token: dict[str, str] = {}
        while True:
            page = _RETRY.call(
                lambda token=token: client.list_objects_v2(  # type: ignore[misc]
                    Bucket=url.bucket, Prefix=prefix, **token, **payer, **more
                ),
                str(url),
                Counter(),
            )
            yield page
            if not page.get("IsTruncated"):
                return
            token = {"ContinuationToken": page["NextContinuationToken"]}

    def objects(page: dict[str, Any]) -> Iterator[Listed]:
        contents = page.get("Contents", [])
        _check_archived([(o["Key"], o.get("StorageClass"), None) for o in contents], url)
        for found in contents:
            if found["Size"] or not found["Key"].endswith("/"):
                yield Listed(found["Key"], int(found["Size"]), found["ETag"])

    flat = pages(url.key)
    first = next(flat)
    names = {found["Key"][len(url.key) :].partition("/")[0] for found in first.get("Contents", [])}
    if first.get("IsTruncated") and len(names) <= _THREADS:
        # Full folders: list them at the same time. Of small ones one after the other takes fewer requests.
        level = next(pages(url.key, Delimiter="/"))
        if not level.get("IsTruncated"):
            yield from objects(level)
            prefixes = [common["Prefix"] for common in level.get("CommonPrefixes", [])]
            with ThreadPoolExecutor(_THREADS, thread_name_prefix="bucketfeed-list") as pool:
                for found in pool.map(lambda prefix: [o for page in pages(prefix) for o in objects(page)], prefixes):
                    yield from found
            return
    yield from objects(first)
    for page in flat:
        yield from objects(page)


def _check_archived(objects: list[tuple[str, str | None, str | None]], url: Url) -> None:
    archived = [
        (key, kind)
        for key, kind, restore in objects
        if kind in _ARCHIVED and 'ongoing-request="false"' not in (restore or "")
    ]
    if archived:
        key, kind = archived[0]
        raise AccessError(
            f"{url} has archived objects that can't be read: {url.root}{key} has storage class {kind} "
            f"({len(archived)} such on this page); restore them, or open a prefix without them"
        )
