"""Raw objects: each object is one sample with one field, named by its extension."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from bucketfeed.formats.format import Format
from bucketfeed.store.manifest import Manifest
from bucketfeed.store.ranges import Buffer


@dataclass(frozen=True)
class Raw(Format):
    """Every object is one sample, as its store has it."""

    name: ClassVar[str] = "raw"
    indexed: ClassVar[bool] = False

    def sample(self, buffer: Buffer, manifest: Manifest, shard: int, start: int) -> dict[str, Any]:
        """Return the sample of a whole object; see the module's `sample`."""
        return sample(buffer, manifest.key(shard))

    def stream(self, buffers: Iterable[Buffer], manifest: Manifest, shard: int) -> Iterator[dict[str, Any]]:
        """Yield the object itself."""
        yield sample(b"".join(buffers), manifest.key(shard))


def sample(buffer: Buffer, key: str) -> dict[str, Any]:
    """Return the sample of the object at `key` (relative to the data set): `dogs/rex.JPG` is `jpg` of `dogs/rex`.

    The last dot splits, since a bucket's objects are named freely; an object without an extension has field `bin`.
    """
    stem, field = names(key)
    return {"__key__": stem, field: bytes(buffer)}


def names(key: str) -> tuple[str, str]:
    """Return the sample's key and the field's name of the object at `key`."""
    stem, extension = os.path.splitext(key)
    return stem, extension[1:].lower() or "bin"
