"""Reads ranges of S3 and GCS objects with obstore: its requests run outside the GIL, one for each range of the plan."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Sequence
from typing import Any

from bucketfeed.store.faults import check_version, raise_if_changed
from bucketfeed.store.fetching import read_planned
from bucketfeed.store.fsspec import FsspecReader
from bucketfeed.store.gcs import GcsAccess
from bucketfeed.store.process import PerProcess
from bucketfeed.store.ranges import Buffer, Counter, Range
from bucketfeed.store.s3 import S3Access
from bucketfeed.store.urls import parse_url

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


class _Runtime:
    """Whether obstore's threads can work in this process: they do not survive a fork, and calls would hang."""

    used = False
    lost = False


def _after_fork_in_child() -> None:
    _Runtime.lost = _Runtime.lost or _Runtime.used


os.register_at_fork(after_in_child=_after_fork_in_child)


class _Stores:
    """obstore's clients by bucket. The threads of a first batch ask at once: one client, one pool of connections."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # no child inherits it held: each process has its own `_Stores`
        self._stores: dict[str, Any] = {}

    def get(self, bucket: str, make: Callable[[str], Any]) -> Any:
        """Return the client for `bucket`, made by the first that asks."""
        with self._lock:
            if bucket not in self._stores:
                self._stores[bucket] = make(bucket)
            return self._stores[bucket]


class ObstoreReader:
    """A `RangeReader` of `s3://` and `gs://` URLs. `access` is `resolved`, so that it holds in every process.

    In a forked child of a process that has used obstore, and for keys that obstore's paths cannot say ("//", a
    leading or trailing "/", "." and ".." between slashes, control characters), it reads through s3fs or gcsfs.
    """

    is_local = False

    def __init__(self, access: S3Access | GcsAccess, *, counter: Counter | None = None) -> None:
        self.counter = counter or Counter()
        self._access = access
        self._stores = PerProcess(_Stores)
        self._other = FsspecReader(*access.fsspec(), counter=self.counter)

    def read(self, ranges: Sequence[Range]) -> list[Buffer]:
        """Return the bytes of each range; see `RangeReader.read`."""
        if _Runtime.lost:
            return self._other.read(ranges)
        odd = [place for place, range in enumerate(ranges) if not _sayable(range.url)]
        if not odd:
            return read_planned(ranges, self._fetch, self.counter, renew=self._renew)
        buffers: list[Buffer] = [b""] * len(ranges)
        rest = [place for place in range(len(ranges)) if place not in set(odd)]
        for places, read in ((odd, self._other.read), (rest, self.read)):
            for place, buffer in zip(places, read([ranges[p] for p in places]), strict=True):
                buffers[place] = buffer
        return buffers

    def _fetch(self, range: Range) -> Buffer:
        import obstore

        _Runtime.used = True
        _, bucket, key = parse_url(range.url)
        store = self._stores.get().get(bucket, self._access.obstore)
        options: Any = {"range": (range.start, range.stop)}
        if range.etag:
            options.update(self._access.asked(range.etag))
        try:
            reply = obstore.get(store, key, options=options)
            check_version(range, self._access.version(reply.meta))
            return memoryview(reply.bytes())
        except Exception as e:
            raise_if_changed(e, range, lambda: self._access.version(obstore.head(store, key)))
            raise

    def _renew(self) -> None:
        self._stores.forget()

    def __reduce__(self) -> tuple[type[ObstoreReader], tuple[S3Access | GcsAccess]]:
        return type(self), (self._access,)

    def __repr__(self) -> str:
        return f"ObstoreReader({self._access!r})"


def _sayable(url: str) -> bool:
    key = parse_url(url).key
    return not _CONTROL.search(key) and all(part not in ("", ".", "..") for part in key.split("/"))
