"""Objects whose lines are samples: JSON lines and plain text, as they lie there or compressed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from bucketfeed.errors import FormatError
from bucketfeed.formats.compression import SUFFIXES, codec_of, decompressed
from bucketfeed.formats.format import Format, Ints
from bucketfeed.formats.window import Source
from bucketfeed.store.ahead import read_through
from bucketfeed.store.manifest import Manifest
from bucketfeed.store.ranges import Buffer, Range, RangeReader

BLOCK_BYTES = 4 << 20  # searched at a time
_NEWLINE = 10
_SPACE = 32
_BLANK = b" \t\r\n"
_BOM = b"\xef\xbb\xbf"
_OTHER_ENCODINGS = {  # in this order: the first of UTF-32 is also one of UTF-16
    b"\xff\xfe\0\0": "UTF-32",
    b"\0\0\xfe\xff": "UTF-32",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
}


def with_compressed(*suffixes: str) -> tuple[str, ...]:
    """Return the endings given and those of the same objects compressed."""
    return tuple(suffix + more for suffix in suffixes for more in ("", *SUFFIXES))


class Lines(Format):
    """A format whose objects may be compressed; ranges in them count decompressed bytes."""

    def range(self, manifest: Manifest, shard: int, start: int, stop: int) -> Range:
        """Return a range of the decompressed object, whose version also names the compression."""
        plain = manifest.range(shard, start, stop)
        codec = codec_of(manifest.key(shard))
        return plain if codec is None else plain._replace(etag=f"{plain.etag or manifest.version}+{codec}")

    def decodes(self, manifest: Manifest) -> bool:
        """Return whether some of the objects are compressed."""
        return any(codec_of(manifest.key(shard)) is not None for shard in range(len(manifest)))

    def contents(self, buffers: Iterable[Buffer], url: str) -> Iterable[Buffer] | None:
        """Return the decompressed bytes; None where the object is not compressed."""
        codec = codec_of(url)
        return None if codec is None else decompressed(codec, buffers, url)

    def line(self, manifest: Manifest, shard: int, start: int, reader: RangeReader) -> int:
        """Return the line that `start` lies in, by counting the newlines before it."""
        read = read_through(reader, manifest.range(shard), BLOCK_BYTES)
        newlines = at = 0
        for buffer in self.contents(read, manifest.object_url(shard)) or read:
            newlines += int(np.count_nonzero(np.frombuffer(buffer[: start - at], np.uint8) == _NEWLINE))
            at += len(buffer)
            if at >= start:
                break
        return newlines + 1


@dataclass(frozen=True)
class Jsonl(Lines):
    """JSON lines: each line that is not blank is a sample, its object's members are the fields.

    A value that is no object is field `json`. A byte order mark is passed over; `\\r\\n` ends a line as `\\n` does.
    """

    name: ClassVar[str] = "jsonl"
    suffixes: ClassVar[tuple[str, ...]] = with_compressed(".jsonl", ".ndjson")

    def scan(self, source: Source, url: str) -> Iterator[tuple[Ints, Ints]]:
        """Yield starts and stops of the lines that are not blank, without their ends."""
        return scan_lines(source, url, blanks=False)

    def sample(self, buffer: Buffer, manifest: Manifest, shard: int, start: int) -> dict[str, Any]:
        """Return the fields of a line. Raises `FormatError` where it is no JSON."""
        text = decoded(buffer, manifest, shard, start)
        try:
            value = json.loads(text)
        except ValueError as e:
            raise FormatError(
                f"{manifest.object_url(shard)}: no JSON in the line at byte {start}: {e}; it begins {text[:60]!r}"
            ) from e
        key = f"{manifest.key(shard)}@{start}"
        return {"__key__": key, **value} if isinstance(value, dict) else {"__key__": key, "json": value}


@dataclass(frozen=True)
class Text(Lines):
    """Lines of text: each one is a sample with field `text`, blank ones too, without `\\n` or `\\r\\n`."""

    name: ClassVar[str] = "text"
    suffixes: ClassVar[tuple[str, ...]] = with_compressed(".txt")

    def scan(self, source: Source, url: str) -> Iterator[tuple[Ints, Ints]]:
        """Yield starts and stops of all lines, without their `\\n`."""
        return scan_lines(source, url, blanks=True)

    def sample(self, buffer: Buffer, manifest: Manifest, shard: int, start: int) -> dict[str, Any]:
        """Return the text of a line."""
        text = decoded(buffer, manifest, shard, start)
        return {"__key__": f"{manifest.key(shard)}@{start}", "text": text.removesuffix("\r")}


def decoded(buffer: Buffer, manifest: Manifest, shard: int, start: int) -> str:
    """Return the text of a sample, without byte order mark. Raises `FormatError` where it is not UTF-8."""
    try:
        return str(buffer, "utf-8").removeprefix("\ufeff")  # quicker than "utf-8-sig"
    except UnicodeDecodeError as e:
        raise FormatError(
            f"{manifest.object_url(shard)}: the line at byte {start} is not UTF-8: {e}; write the object as UTF-8"
        ) from e


def scan_lines(
    source: Source, url: str, *, blanks: bool, block_bytes: int = BLOCK_BYTES
) -> Iterator[tuple[Ints, Ints]]:
    """Yield starts and stops of the lines of a source, in blocks; those with nothing in them only with `blanks`.

    Only `\\n` ends a line. Raises `FormatError` for another encoding than UTF-8.
    """
    begin = first_byte(source, url)  # of the line that is open
    filled = False  # whether there is more than blanks in it
    end = 0
    for at, buffer in blocks(source, block_bytes):
        data = np.frombuffer(buffer, np.uint8)
        ends = np.flatnonzero(data == _NEWLINE)
        if len(ends):
            starts = np.concatenate([[begin], ends[:-1] + at + 1])
            kept = np.ones(len(ends), bool) if blanks else _filled(buffer, data, np.maximum(starts - at, 0), ends)
            kept[0] |= filled
            if kept.any():
                yield starts[kept], ends[kept] + at
            begin, filled = at + int(ends[-1]) + 1, False
        filled = filled or bool(bytes(buffer[max(begin - at, 0) :]).strip(_BLANK))
        end = at + len(buffer)
    if end > begin and (filled or blanks):
        yield np.array([begin], np.int64), np.array([end], np.int64)


def _filled(buffer: Buffer, data: NDArray[np.uint8], starts: Ints, ends: Ints) -> NDArray[np.bool_]:
    """Return which lines of a buffer have more than blanks in them."""
    filled = np.ones(len(starts), bool)
    for number in np.flatnonzero(data[starts] <= _SPACE).tolist():  # only these can be blank
        filled[number] = bool(bytes(buffer[starts[number] : ends[number]]).strip(_BLANK))
    return filled


def blocks(source: Source, block_bytes: int) -> Iterator[tuple[int, Buffer]]:
    """Yield all bytes of a source in buffers, each with where it starts."""
    at = 0
    while len(buffer := source.view(at, at + block_bytes)):
        yield at, buffer
        at += len(buffer)


def first_byte(source: Source, url: str) -> int:
    """Return where text begins: behind its byte order mark. Raises `FormatError` where that is of another encoding."""
    head = bytes(source.view(0, 4))
    for mark, encoding in _OTHER_ENCODINGS.items():
        if head.startswith(mark):
            raise FormatError(f"{url} is {encoding}, not UTF-8; write the object as UTF-8")
    return len(_BOM) if head.startswith(_BOM) else 0
