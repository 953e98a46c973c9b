"""Which access a URL's scheme takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from bucketfeed.store.gcs import GcsAccess, google_access
from bucketfeed.store.s3 import S3Access

Access: TypeAlias = S3Access | GcsAccess


def bucket_access(scheme: str, storage_options: Mapping[str, Any] | None) -> Access | None:
    """Return the access to the buckets of `scheme`, or None where fsspec alone knows it. Raises `ConfigError`."""
    if scheme == "s3":
        return S3Access.from_options(storage_options)
    if scheme == "gs":
        return google_access(storage_options)
    return None
