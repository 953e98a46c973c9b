"""Lists what is under a URL: exact keys, sizes, versions."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from bucketfeed.errors import AccessError, BucketfeedError, ReadError
from bucketfeed.store.access import bucket_access
from bucketfeed.store.faults import Fault, fault_of, our_error
from bucketfeed.store.fsspec import open_filesystem, version_token
from bucketfeed.store.gcs import GcsAccess
from bucketfeed.store.local import file_version
from bucketfeed.store.ranges import Counter
from bucketfeed.store.retry import Retry
from bucketfeed.store.s3 import S3Access
from bucketfeed.store.urls import Url

_THREADS = 8
_PAGE = 1000  # objects; of GCS, as S3 has it
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
    access = bucket_access(url.scheme, storage_options)
    if isinstance(access, S3Access):
        return _s3_object(url, access)
    if access is not None:
        return _gs_object(url, access)
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
        return
    access = bucket_access(url.scheme, storage_options)
    if access is None:
        yield from _fsspec_files(url, storage_options)
    else:
        yield from _bucket_objects(
            url, _s3_pages(url, access) if isinstance(access, S3Access) else _gs_pages(url, access)
        )


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


class _Page(NamedTuple):
    """A page of a bucket's listing; `is_last` where no other follows."""

    objects: list[Listed]
    prefixes: list[str]
    is_last: bool


_Pages = Callable[[str, str], Iterator[_Page]]  # of a prefix and a delimiter


def _bucket_objects(url: Url, pages: _Pages) -> Iterator[Listed]:
    """List page by page, or full folders beneath `url` at the same time."""

    def flat(prefix: str) -> Iterator[Listed]:
        return (found for page in pages(prefix, "") for found in page.objects)

    rest = pages(url.key, "")
    first = next(rest)
    names = {found.key[len(url.key) :].partition("/")[0] for found in first.objects}
    if not first.is_last and len(names) <= _THREADS:
        # Full folders: list them at the same time. Of small ones one after the other takes fewer requests.
        level = next(pages(url.key, "/"))
        if level.is_last:
            yield from _real(level.objects)
            with ThreadPoolExecutor(_THREADS, thread_name_prefix="bucketfeed-list") as pool:
                for found in pool.map(lambda prefix: list(flat(prefix)), level.prefixes):
                    yield from _real(found)
            return
    yield from _real(first.objects)
    for page in rest:
        yield from _real(page.objects)


def _real(objects: Iterable[Listed]) -> Iterator[Listed]:
    return (found for found in objects if found.size or not found.key.endswith("/"))


def _s3_pages(url: Url, access: S3Access) -> _Pages:
    client = access.client()
    payer = {"RequestPayer": "requester"} if access.requester_pays else {}

    def pages(prefix: str, delimiter: str) -> Iterator[_Page]:
        more = {"Delimiter": delimiter} if delimiter else {}
        while True:
            page = _RETRY.call(
                lambda more=more: client.list_objects_v2(Bucket=url.bucket, Prefix=prefix, **more, **payer),  # type: ignore[misc]
                str(url),
                Counter(),
            )
            contents = page.get("Contents", [])
            _check_archived([(o["Key"], o.get("StorageClass"), None) for o in contents], url)
            is_last = not page.get("IsTruncated")
            yield _Page(
                [Listed(o["Key"], int(o["Size"]), o["ETag"]) for o in contents],
                [common["Prefix"] for common in page.get("CommonPrefixes", [])],
                is_last,
            )
            if is_last:
                return
            more = more | {"ContinuationToken": page["NextContinuationToken"]}

    return pages


def _gs_object(url: Url, access: GcsAccess) -> Listed | None:
    if not url.key:
        return None
    call = access.filesystem().call
    try:
        found = _RETRY.call(lambda: call("GET", "b/{}/o/{}", url.bucket, url.key, json_out=True), str(url), Counter())
    except (FileNotFoundError, PermissionError):
        return None  # the listing finds the words
    return _gs_listed(found)


def _gs_pages(url: Url, access: GcsAccess) -> _Pages:
    """List by gcsfs's own calls: its `find` takes prefixes for folders."""
    call = access.filesystem().call
    fields = "items(name,size,generation),prefixes,nextPageToken"

    def pages(prefix: str, delimiter: str) -> Iterator[_Page]:
        more = {"delimiter": delimiter} if delimiter else {}
        while True:
            page = _RETRY.call(
                lambda more=more: call(  # type: ignore[misc]
                    "GET", "b/{}/o", url.bucket, prefix=prefix, maxResults=_PAGE, fields=fields, json_out=True, **more
                ),
                str(url),
                Counter(),
            )
            token = page.get("nextPageToken")
            yield _Page([_gs_listed(o) for o in page.get("items", [])], page.get("prefixes", []), not token)
            if not token:
                return
            more = more | {"pageToken": token}

    return pages


def _gs_listed(found: Mapping[str, Any]) -> Listed:
    return Listed(found["name"], int(found["size"]), str(found["generation"]))


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
