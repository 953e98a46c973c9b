"""Raw objects: each object is one sample with one field, named by its extension."""

from __future__ import annotations

import os
from typing import Any

from bucketfeed.store.ranges import Buffer


def sample(buffer: Buffer, key: str) -> dict[str, Any]:
    """Return the sample of the object at `key` (relative to the data set): `dogs/rex.JPG` is `jpg` of `dogs/rex`.

    The last dot splits, since a bucket's objects are named freely; an object without an extension has field `bin`.
    """
    stem, extension = os.path.splitext(key)
    return {"__key__": stem, extension[1:].lower() or "bin": bytes(buffer)}
