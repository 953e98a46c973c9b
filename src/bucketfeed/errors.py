"""Every error that bucketfeed raises on purpose.

Each takes one string, so it survives pickling on its way out of a worker with its type and its text.
Each is also the builtin that fits, so that code which knows nothing of bucketfeed can catch it.
"""

from __future__ import annotations


class BucketfeedError(Exception):
    """Anything bucketfeed reports: the thing concerned, the values at odds, and what to do next."""


class ConfigError(BucketfeedError, ValueError):
    """An argument or option that cannot work, alone or with the others."""


class NotFoundError(BucketfeedError, FileNotFoundError):
    """A bucket, prefix or object that is not there."""


class AccessError(BucketfeedError, PermissionError):
    """The store refused: no credentials, expired ones, no permission, or an archived object."""


class ObjectChangedError(BucketfeedError):
    """An object is no longer the version that the manifest froze (both etags are in the text)."""


class ReadError(BucketfeedError, OSError):
    """A read that failed after all retries; names url, range, tries and last cause."""


class FormatError(BucketfeedError, ValueError):
    """Bytes that are not the format they should be; names the shard and the offset."""


class DecodeError(BucketfeedError, ValueError):
    """A sample whose decode function failed; names the sample and keeps the cause's text."""


class CacheError(BucketfeedError, OSError):
    """A cache folder that cannot be used."""


class ResumeError(BucketfeedError, ValueError):
    """A saved state that belongs to another data set, order or version."""


class WriteError(BucketfeedError, OSError):
    """A write that failed after all retries; names url, step and last cause. What was not finished is not visible."""
