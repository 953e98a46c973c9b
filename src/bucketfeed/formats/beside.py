"""The files that lie beside shards which were written here: their index, and the record of how far the writing is."""

from __future__ import annotations

import logging
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from bucketfeed.errors import BucketfeedError, WriteError
from bucketfeed.formats.build import find_samples
from bucketfeed.formats.detect import is_sidecar
from bucketfeed.formats.format import Ints
from bucketfeed.formats.index_files import HEAD_BYTES, version_in, version_of, write_index
from bucketfeed.formats.journal import Journal
from bucketfeed.formats.tar import Tar
from bucketfeed.store.ahead import read_through
from bucketfeed.store.manifest import Manifest
from bucketfeed.store.ranges import Range, RangeReader
from bucketfeed.store.readers import open_reader
from bucketfeed.store.urls import parse_url
from bucketfeed.store.writing import Writer

Placed: TypeAlias = "tuple[str, int, Ints | None, Ints | None]"  # a shard's name, size, starts and lengths

_log = logging.getLogger(__name__)

INDEX = "_bucketfeed.idx"
JOURNAL = "_bucketfeed.json"
_SHARD = re.compile(r"shard-\d{6,}(_\d{3,})?\.tar")
_STEP_BYTES = 4 << 20


def is_shard(name: str) -> bool:
    """Return whether a shard that is written here may be called so."""
    return _SHARD.fullmatch(name) is not None


def is_ours(name: str) -> bool:
    """Return whether `name` is one that is written here: a shard's, or that of a file beside them."""
    return name in (INDEX, JOURNAL) or is_shard(name)


def with_index(manifest: Manifest, reader: RangeReader, folder: Path, path: str | os.PathLike[str] | None) -> Manifest:
    """Return the manifest of the shards alone, with their index put where `build_index` looks for it.

    That is `path`, where that is a file here, or under its version in `folder`. Where there is no index beside the
    shards, or other data too, the manifest is returned as it is. An index of other versions of the shards is found out
    by its name there.
    """
    at = _found(manifest, INDEX)
    if at is None:
        if _found(manifest, JOURNAL) is not None:
            _log.warning(
                "%s holds the shards of a writing that is not complete; the same call or command completes it",
                manifest.url,
            )
        return manifest
    keys = [manifest.key(i) for i in range(len(manifest))]
    shards = [i for i, key in enumerate(keys) if is_shard(key)]
    if not shards or not all(is_ours(key) or is_sidecar(key) for key in keys):
        return manifest
    objects = ((manifest.object_url(i), manifest.size(i), manifest.etag(i)) for i in shards)
    alone = Manifest.from_objects(manifest.url, objects, folder=folder)
    here = None if path is None else parse_url(path)
    kept = Path(here.key) if here and here.scheme == "file" else folder / f"{version_of(alone, Tar())}.idx"
    if not kept.exists():
        try:
            kept.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=kept.parent, prefix=kept.name, delete=False) as file:
                file.writelines(read_through(reader, manifest.range(at), _STEP_BYTES))
            os.replace(file.name, kept)
        except (BucketfeedError, OSError) as e:
            _log.warning("the index beside %s can't be used, it is built anew: %s", manifest.url, e)
    return alone


def _found(manifest: Manifest, name: str) -> int | None:
    try:
        return manifest.find(manifest.url + name)
    except KeyError:
        return None


def publish_index(writer: Writer, shards: Sequence[Placed], options: Mapping[str, Any] | None) -> None:
    """Write the index of `shards` beside them; those whose samples are not known are scanned.

    An index that is there and names these versions stays. Raises `WriteError` where the shards are not there as they
    were written.
    """
    listed = writer.listed()
    for name, size, *_ in shards:
        if name not in listed or listed[name].size != size:
            raise WriteError(
                f"{writer.url}{name} is not there as it was written; does another run write here? Do the same again "
                "when it has ended"
            )
    reader = open_reader(writer.url, options)
    with tempfile.TemporaryDirectory(prefix="bucketfeed-") as folder:
        objects = [(writer.url + name, size, listed[name].etag) for name, size, *_ in shards]
        manifest = Manifest.from_objects(writer.url, objects, folder=folder)
        if INDEX in listed:
            head = bytes(reader.read([Range(writer.url + INDEX, 0, min(HEAD_BYTES, listed[INDEX].size))])[0])
            if version_in(head) == version_of(manifest, Tar()):
                return
        with Journal(Path(folder) / "parts", "written") as journal:
            for number, (_, _, starts, lengths) in enumerate(shards):
                if starts is not None and lengths is not None:
                    journal.add(number, starts, lengths)
            samples = find_samples(
                manifest, Tar(), reader, journal, cache=None, chunk_bytes=_STEP_BYTES, progress=False
            )
        path = Path(folder) / INDEX
        write_index(path, manifest, Tar(), samples, sum(len(starts) for _, starts, _ in samples))
        with writer.open(INDEX) as upload, path.open("rb") as file:
            while data := file.read(_STEP_BYTES):
                upload.write(data)
