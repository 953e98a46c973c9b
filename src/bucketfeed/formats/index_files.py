"""Files that hold an index: the rows of all samples, how they were found, and the manifest of their objects."""

from __future__ import annotations

import bisect
import dataclasses
import hashlib
import json
import mmap
import os
import struct
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bucketfeed.errors import CacheError, ConfigError
from bucketfeed.formats.format import Format, Ints
from bucketfeed.store.manifest import Manifest

# A sample is two words of 64 bits: start and length in the low 48, the shard's number in the two high 16.
OFFSET_BITS = 48
LOW = (1 << OFFSET_BITS) - 1
HEAD_BYTES = 64
_HEAD = struct.Struct("<16s32sQQ")  # magic, version, samples, bytes behind the rows: a line of JSON, the manifest
_ANY_MAGIC = b"bucketfeed idx "
_MAGIC = _ANY_MAGIC + b"2"
_BLOCK_ROWS = 1 << 20  # rows worked on at a time, to keep temporaries small

Rows = NDArray[np.uint64]
Samples = tuple["int | Ints", Ints, Ints]  # shard or shards, starts, lengths


def fingerprint_of(manifest: Manifest, format: Format) -> str:
    """Return the name of the samples: a copy of a folder has the same."""
    return _named(manifest.fingerprint, format)


def version_of(manifest: Manifest, format: Format) -> str:
    """Return the name of the bytes that were indexed: a file written anew has another one, be it of the same size."""
    return _named(manifest.version, format)


def _named(data: str, format: Format) -> str:
    return hashlib.blake2b(f"{data} {_cut_by(format)}".encode(), digest_size=16).hexdigest()


def _cut_by(format: Format) -> str:
    return f"{format.name} {format.version}{format.numbering}"


@dataclass(frozen=True, eq=False)
class IndexFile:
    """An index as it lies in a file, mapped.

    Attributes:
        version: the name of the bytes that were indexed; see `version_of`.
        rows: two words for each sample, in the order of shards and bytes.
        about: the objects' common `url`, the `format` and its `options` (None where they can't be told), `cut_by` what
            the samples were found, and what all shards `agreed` on.
        manifest_data: the manifest's own file.
    """

    path: Path
    version: str
    rows: Rows
    about: Mapping[str, Any]
    manifest_data: memoryview

    @classmethod
    def open(cls, path: Path) -> IndexFile:
        """Return the file at `path`, mapped. Raises `CacheError` where it isn't a whole index."""
        again = "remove it and open the data set again"
        try:
            with open(path, "rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        except (OSError, ValueError) as e:
            raise CacheError(f"the index {path} can't be opened: {e}; open the data set again") from e
        version = version_in(mapped[:HEAD_BYTES])
        if version is None:
            raise CacheError(f"{path} is no index of this version; {again}")
        *_, samples, rest = _HEAD.unpack_from(mapped)
        about_at = HEAD_BYTES + 16 * samples
        manifest_at = mapped.find(b"\n", about_at) + 1
        if len(mapped) != about_at + rest:
            raise CacheError(f"the index {path} has {len(mapped)} bytes, not those of {samples} samples; {again}")
        rows = np.frombuffer(mapped, "<u8", 2 * samples, HEAD_BYTES).reshape(-1, 2)
        about = json.loads(mapped[about_at:manifest_at])
        return cls(path, version, rows, about, memoryview(mapped)[manifest_at:])

    def fits(self, manifest: Manifest, format: Format) -> bool:
        """Tell whether rows of unchanged shards are the same in an index of `manifest` in this format."""
        now = (manifest.url, _cut_by(format), format.agreed)
        return now == (self.about["url"], self.about["cut_by"], self.about["agreed"])

    def format(self, format_of: Callable[[str], Format]) -> Format:
        """Return the format it was indexed by, with its options. Raises `ConfigError` where it can't be told."""
        options = self.about["options"]
        if options is None:
            raise ConfigError(f"{self.path} was indexed by a format of its own: give it as format=")
        given = {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}
        return dataclasses.replace(format_of(self.about["format"]), **given)  # type: ignore[type-var]

    def samples_of(self, shard: int) -> tuple[Ints, Ints]:
        """Return starts and lengths of the samples of a shard."""
        first, end = (
            bisect.bisect_left(range(len(self.rows)), which, key=lambda i: int(unpacked(self.rows[i : i + 1])[0][0]))
            for which in (shard, shard + 1)
        )
        return unpacked(self.rows[first:end])[1:]


def unpacked(rows: Rows) -> tuple[Ints, Ints, Ints]:
    """Return shard, start and length of each row."""
    words = rows.view(np.int64)
    high = words >> OFFSET_BITS & 0xFFFF
    low = words & LOW
    return high[:, 0] | high[:, 1] << 16, low[:, 0], low[:, 1]


def version_in(head: bytes) -> str | None:
    """Return the version that the first bytes of an index say; None where they are not those of one."""
    if len(head) < HEAD_BYTES or not head.startswith(_MAGIC):
        return None
    return str(_HEAD.unpack_from(head)[1], "ascii", "replace")


def check_replaceable(start: bytes, name: str) -> None:
    """Raise `ConfigError` where what lies at `name` and begins with `start` is no index of any version."""
    start = start[: len(_MAGIC)]
    if start and not start.startswith(_ANY_MAGIC):
        raise ConfigError(f"index={name!r} is no index, it starts with {start!r}; give another path")


def write_index(path: Path, manifest: Manifest, format: Format, samples: Iterable[Samples], count: int) -> None:
    """Publish the index of `count` samples, given in blocks in the order of shards and bytes, at `path`."""
    about = {
        "url": manifest.url,
        "format": format.name,
        "options": _options(format),
        "cut_by": _cut_by(format),
        "agreed": format.agreed,
    }
    tail = json.dumps(about).encode() + b"\n" + manifest.data
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.name, delete=False) as file:
            file.write(_HEAD.pack(_MAGIC, version_of(manifest, format).encode(), count, len(tail)))
            for shards, starts, lengths in samples:
                for at in range(0, len(starts), _BLOCK_ROWS):
                    some = slice(at, at + _BLOCK_ROWS)
                    file.write(_packed(shards[some] if np.ndim(shards) else shards, starts[some], lengths[some]).data)  # type: ignore[index]
            file.write(tail)
        os.replace(file.name, path)
    except OSError as e:
        raise CacheError(f"the index {path} can't be written: {e}; make room or choose another place") from e


def _packed(shards: int | Ints, starts: Ints, lengths: Ints) -> Rows:
    rows = np.empty((len(starts), 2), "<u8")
    for column, offsets, part in ((0, starts, np.asarray(shards) & 0xFFFF), (1, lengths, np.asarray(shards) >> 16)):
        rows[:, column] = offsets.astype(np.uint64) | part.astype(np.uint64) << np.uint64(OFFSET_BITS)
    return rows


def _options(format: Format) -> dict[str, Any] | None:
    if not dataclasses.is_dataclass(format):
        return None
    options = {field.name: getattr(format, field.name) for field in dataclasses.fields(format)}
    try:
        return options if json.loads(json.dumps(options)) is not None else None
    except TypeError:
        return None
