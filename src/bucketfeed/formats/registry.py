"""The formats that data sets can have, by name: one line each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from bucketfeed.errors import ConfigError
from bucketfeed.formats import raw, tar
from bucketfeed.formats.window import Source
from bucketfeed.store.manifest import Manifest
from bucketfeed.store.ranges import Buffer


@dataclass(frozen=True, slots=True)
class Format:
    """How the objects of a data set hold samples.

    Attributes:
        name: what `format=` says.
        version: goes up when the same bytes give other samples than before; an older index is then built anew.
        suffixes: endings of the names of objects that are shards; empty where every object belongs.
        scan: yields start and stop of each sample of one shard, given its source and its url; None where every
            object is one sample, so that there is nothing to look up.
        sample: makes a sample from its bytes, given the manifest, the shard's number and the sample's start in it.
    """

    name: str
    version: int
    suffixes: tuple[str, ...]
    scan: Callable[[Source, str], Iterator[tuple[int, int]]] | None
    sample: Callable[[Buffer, Manifest, int, int], dict[str, Any]]


def _raw(buffer: Buffer, manifest: Manifest, shard: int, start: int) -> dict[str, Any]:
    return raw.sample(buffer, manifest.key(shard))


def _tar(buffer: Buffer, manifest: Manifest, shard: int, start: int) -> dict[str, Any]:
    return tar.sample(buffer, manifest.object_url(shard), start)


_FORMATS = {
    format.name: format
    for format in (
        Format("raw", version=1, suffixes=(), scan=None, sample=_raw),
        Format("tar", version=1, suffixes=(".tar",), scan=tar.scan, sample=_tar),
    )
}


def format_named(name: str) -> Format:
    """Return the format called `name`. Raises `ConfigError`, which lists the known ones."""
    if name not in _FORMATS:
        known = ", ".join(repr(known) for known in ("auto", *_FORMATS))
        raise ConfigError(f"there is no format {name!r}; choose one of {known}")
    return _FORMATS[name]
