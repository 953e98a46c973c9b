"""URLs of objects, with keys exactly as the store knows them: nothing is decoded, encoded, squeezed or cut."""

from __future__ import annotations

import os
import re
from typing import NamedTuple

from bucketfeed.errors import ConfigError

_SCHEME = re.compile(r"([a-zA-Z][a-zA-Z0-9+.\-]*)://")
# Those whose first part names a bucket (or host); elsewhere all that follows "://" is a path.
_BUCKETS = {"s3", "gs", "az", "abfs", "http", "https"}
_NAMED = re.compile(r"[A-Za-z0-9._\-]{1,255}")  # what boto3 takes for a bucket's name
_SAME = {"s3a": "s3", "s3n": "s3", "gcs": "gs", "local": "file"}


class Url(NamedTuple):
    """A URL in parts: `scheme://bucket/key`; without a bucket, for paths, `scheme://key`."""

    scheme: str
    bucket: str
    key: str

    def __str__(self) -> str:
        return f"{self.root}{self.key}"

    @property
    def root(self) -> str:
        """All that comes before the key."""
        return f"{self.scheme}://{self.bucket}/" if self.bucket else f"{self.scheme}://"


def parse_url(url: str | os.PathLike[str]) -> Url:
    """Return the parts of `url`; a path without a scheme becomes an absolute `file://` URL.

    Raises `ConfigError` for an empty URL and for one without a bucket, or with one that can't be.

    >>> parse_url("s3://bucket//a#b?c")
    Url(scheme='s3', bucket='bucket', key='/a#b?c')
    """
    text = os.fspath(url)
    if not text:
        raise ConfigError("the URL is empty: give a path or something like 's3://bucket/prefix/'")
    match = _SCHEME.match(text)
    if match is None:
        return Url("file", "", _absolute(text))
    scheme = _SAME.get(match[1].lower(), match[1].lower())
    rest = text[match.end() :]
    if scheme == "file":
        return Url(scheme, "", _absolute(rest))
    if scheme not in _BUCKETS:
        return Url(scheme, "", rest.lstrip("/") if scheme == "memory" else rest)
    bucket, _, key = rest.partition("/")
    if not bucket:
        raise ConfigError(f"{text!r} names no bucket: write {scheme}://bucket/prefix/")
    if scheme in ("s3", "gs") and not _NAMED.fullmatch(bucket):
        raise ConfigError(
            f"{text!r} names a bucket {bucket!r}, which is no bucket name: write {scheme}://bucket/prefix/"
        )
    return Url(scheme, bucket, key)


def _absolute(path: str) -> str:
    absolute = os.path.abspath(os.path.expanduser(path))
    return absolute + "/" if path.endswith("/") and absolute != "/" else absolute


def parent_url(url: Url) -> str:
    """Return the URL up to and including the last "/" of its key."""
    return url.root + url.key[: url.key.rfind("/") + 1]
