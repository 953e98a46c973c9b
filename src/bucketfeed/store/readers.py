"""Picks the reader for a URL."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from bucketfeed.store.access import bucket_access
from bucketfeed.store.fsspec import FsspecReader, open_filesystem
from bucketfeed.store.local import LocalReader
from bucketfeed.store.obstore import ObstoreReader
from bucketfeed.store.ranges import Counter
from bucketfeed.store.urls import parse_url


def open_reader(
    url: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None, *, counter: Counter | None = None
) -> ObstoreReader | FsspecReader | LocalReader:
    """Return the reader of ranges for objects at or under `url`.

    obstore for S3 and GCS, plain file reads for paths, fsspec for all else. Raises `ConfigError` for an unknown scheme
    and for options that cannot work.
    """
    parsed = parse_url(url)
    if parsed.scheme == "file":
        return LocalReader(counter=counter)
    if (access := bucket_access(parsed.scheme, storage_options)) is not None:
        return ObstoreReader(access.resolved(parsed.bucket), counter=counter)
    open_filesystem(parsed.scheme, storage_options or {})  # says at once what is wrong with scheme or options
    return FsspecReader(parsed.scheme, storage_options or {}, counter=counter)
