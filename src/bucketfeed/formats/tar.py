"""WebDataset tars: the adjacent members of a key make one sample.

A member's path up to the first dot of its base name is the key, the rest, in lower case, the field:
`train.v1/0001.seg.png` is field `seg.png` of sample `train.v1/0001`. A leading `./` is not part of the key. Folders,
links, devices, dot-files and names without an extension make no sample. ustar, GNU and PAX archives are read alike.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from bucketfeed.errors import FormatError
from bucketfeed.formats.format import Format, Ints, in_blocks
from bucketfeed.formats.window import Source, StreamWindow, Whole
from bucketfeed.store.manifest import Manifest
from bucketfeed.store.ranges import Buffer

_log = logging.getLogger(__name__)

_BLOCK = 512
_END = bytes(_BLOCK)
_RECORD_BYTES = 20 * _BLOCK  # what writers fill up with end blocks
_MAX_EXTENSION_BYTES = 1 << 20  # a long name or PAX header; more than this is damage, not a name
_MAX_DIGITS = 20
_FILES = frozenset(b"0\x007")
_BODILESS = frozenset(b"123456")  # links, devices, folders: whatever their size says, no data follows


@dataclass(frozen=True)
class Tar(Format):
    """WebDataset tars."""

    name: ClassVar[str] = "tar"
    suffixes: ClassVar[tuple[str, ...]] = (".tar",)

    def scan(self, source: Source, url: str) -> Iterator[tuple[Ints, Ints]]:
        """Yield starts and stops in blocks; see the module's `scan`."""
        return in_blocks(scan(source, url))

    def sample(self, buffer: Buffer, manifest: Manifest, shard: int, start: int) -> dict[str, Any]:
        """Return a sample; see the module's `sample`."""
        return sample(buffer, manifest.object_url(shard), start)

    def stream(self, buffers: Iterable[Buffer], manifest: Manifest, shard: int) -> Iterator[dict[str, Any]]:
        """Yield the samples of one shard; see `iter_tar`."""
        return iter_tar(buffers, manifest.object_url(shard))


class _Part(NamedTuple):
    """One member that is a field of a sample; offsets count from the source's first byte."""

    key: str
    field: str
    start: int  # its first header block, a long name's or PAX one included
    data: int
    stop: int


def scan(source: Source, name: str) -> Iterator[tuple[int, int]]:
    """Yield start and stop of each sample of a shard, in order; a source is read at its headers only.

    Raises `FormatError`, which names `name` and the offset, for a cut, damaged or empty object, and for a key whose
    members are not adjacent.
    """
    for parts in _samples(source, name):
        yield parts[0].start, parts[-1].stop


def iter_tar(buffers: Iterable[Buffer], name: str) -> Iterator[dict[str, Any]]:
    """Yield the samples of one shard whose bytes come front to back in `buffers`, holding two samples at most.

    Raises `FormatError` as `scan` does. A sample comes once the next one has begun well, so all that came are whole.
    """
    window = StreamWindow(buffers)
    for parts in _samples(window, name):
        yield _sample(window, parts)
        window.release(parts[-1].stop)


def sample(buffer: Buffer, name: str, start: int = 0) -> dict[str, Any]:
    """Return the sample that `buffer` holds: its `"__key__"` and bytes by field.

    Args:
        buffer: the sample's bytes, from its first header to its last member's end, as `scan` found them.
        name: the shard, for messages.
        start: offset of the buffer in the shard, for messages.
    """
    whole = Whole(buffer)
    return _sample(whole, list(_parts(whole, name, origin=start, verify=False)))


def _sample(source: Source, parts: list[_Part]) -> dict[str, Any]:
    fields: dict[str, Any] = {"__key__": parts[0].key}
    for part in parts:
        fields[part.field] = bytes(source.view(part.data, part.stop))
    return fields


def _samples(source: Source, name: str) -> Iterator[list[_Part]]:
    """Group parts by key; a key that comes again later, or a field twice in a sample, is an error."""
    seen: set[str] = set()
    group: list[_Part] = []
    fields: set[str] = set()
    for part in _parts(source, name):
        if group and part.key == group[0].key:
            if part.field in fields:
                raise FormatError(
                    f"{name}: sample {part.key!r} has field {part.field!r} twice, again at byte {part.start}; "
                    "rename one of the two members"
                )
        else:
            if group:
                yield group
            if part.key in seen:
                raise FormatError(
                    f"{name}: member {part.key + '.' + part.field!r} at byte {part.start} belongs to sample "
                    f"{part.key!r}, which ended before; write the shard with the members of a sample side by side, "
                    "for example with tar --sort=name"
                )
            seen.add(part.key)
            group, fields = [], {"__key__"}
        group.append(part)
        fields.add(part.field)
    if group:
        yield group


def _parts(source: Source, name: str, *, origin: int = 0, verify: bool = True) -> Iterator[_Part]:
    """Yield the members that are fields of samples. `origin` is where the source starts in the shard `name`."""
    at = 0
    start, path, pax_size = -1, None, None  # what extension headers have said about the member to come
    while block := bytes(source.view(at, at + _BLOCK)):
        if len(block) < _BLOCK:
            raise _not_tar(name, block) if at == 0 else _cut(name, "a header", origin + at)
        if block == _END:
            _tell_of_another(source, name, at)
            break
        if verify and not _intact(block):
            if at == 0:
                raise _not_tar(name, block)
            raise FormatError(f"{name}: damaged tar header at byte {origin + at}; write or copy the shard again")
        kind = block[156]
        size = _number(block, 124, 136, name, origin + at)
        if start < 0:
            start = at
        data = at + _BLOCK
        if kind in b"LKxg":
            if size > _MAX_EXTENSION_BYTES or not source.reaches(data + size):
                raise _cut(name, f"an extended header of {size} bytes", origin + at)
            text = bytes(source.view(data, data + size))
            if kind in b"L":
                path = text.split(b"\0", 1)[0]
            elif kind in b"xg":
                records = _records(text, name, origin + at)
                if kind in b"g" and (what := records.keys() & {b"path", b"size"}):
                    raise FormatError(
                        f"{name}: the global PAX header at byte {origin + at} sets {_text(sorted(what)[0])!r} for all "
                        "members, which no sample read on its own can know; write the shard again without it"
                    )
                if kind in b"x":
                    path = records.get(b"path", path)
                    pax_size = records.get(b"size", pax_size)
            at = data + (size + 511) // 512 * 512
            continue
        if kind in b"S":
            raise FormatError(f"{name}: sparse member at byte {origin + start}; write the shard without --sparse")
        if pax_size is not None:
            size = _digits(pax_size, 10, name, origin + start)
        if path is None:
            path = block[:100].split(b"\0", 1)[0]
            if block[257:263] == b"ustar\0" and block[345]:
                path = block[345:500].split(b"\0", 1)[0] + b"/" + path
        folder = kind == 0 and path.endswith(b"/")  # as the oldest tars write it
        stop = data if folder or kind in _BODILESS else data + size
        if not source.reaches(stop):
            raise _cut(name, f"member {_text(path)!r} of {size} bytes", origin + start)
        if kind in _FILES and not folder and (split := _split(_text(path))):
            yield _Part(*split, start, data, stop)
        at = data + (stop - data + 511) // 512 * 512
        start, path, pax_size = -1, None, None
    if at == 0 and not block:
        raise FormatError(f"{name}: an empty object is not a tar archive; remove it or write it again")
    if start >= 0:
        raise _cut(name, "a member's header", origin + start)


def _tell_of_another(source: Source, name: str, end: int) -> None:
    """Warn where an archive follows the end mark at `end`: joined by cat, which no reader of tars looks behind."""
    rest = bytes(source.view(end, end + _RECORD_BYTES + _BLOCK))
    for at in range(0, len(rest) - _BLOCK + 1, _BLOCK):
        if _intact(rest[at : at + _BLOCK]):
            _log.warning(
                "%s: another archive follows the end mark, at byte %d, and its samples are left out; join tars with "
                "tar --concatenate",
                name,
                end + at,
            )
            return


def _split(path: str) -> tuple[str, str] | None:
    """Return key and field of a member; None where it makes no sample."""
    while path.startswith("./"):
        path = path[2:]
    base = path.rfind("/") + 1
    dot = path.find(".", base)
    if dot <= base or dot + 1 == len(path):
        return None
    return path[:dot], path[dot + 1 :].lower()


def _intact(block: bytes) -> bool:
    digits = block[148:156].split(b"\0", 1)[0].strip()
    if not digits or digits.strip(b"01234567"):
        return False
    stored = int(digits, 8)
    spaces = 8 * 32 - sum(block[148:156])
    if stored == sum(block) + spaces:
        return True
    # Some old writers summed signed bytes.
    return stored == sum(block) - 256 * sum(byte > 127 for byte in block) + spaces


def _number(block: bytes, start: int, stop: int, name: str, at: int) -> int:
    """Return a header's number: octal digits, or base 256 where its first bit is set."""
    if block[start] & 0x80:
        number = int.from_bytes(block[start:stop], "big") & ((1 << (8 * (stop - start) - 1)) - 1)
        if number >= 1 << 48:
            raise FormatError(f"{name}: the tar header at byte {at} says {number} bytes; write or copy the shard again")
        return number
    return _digits(block[start:stop].split(b"\0", 1)[0].strip() or b"0", 8, name, at)


def _digits(digits: bytes, base: int, name: str, at: int) -> int:
    # int() alone would take signs, underscores and digits without end.
    if digits.isdigit() and len(digits) <= _MAX_DIGITS and (base == 10 or not digits.strip(b"01234567")):
        return int(digits, base)
    raise FormatError(
        f"{name}: the tar header at byte {at} has {digits[:40]!r} for a size; write or copy the shard again"
    )


def _records(text: bytes, name: str, at: int) -> dict[bytes, bytes]:
    """Return the records of a PAX header: each is `length key=value` and a line feed."""
    records: dict[bytes, bytes] = {}
    while text and text[0]:
        head, space, _ = text.partition(b" ")
        length = int(head) if space and head.isdigit() and len(head) <= _MAX_DIGITS else 0
        keyword, equals, value = text[len(head) + 1 : length - 1].partition(b"=")
        if not equals or text[length - 1 : length] != b"\n":
            raise FormatError(f"{name}: damaged PAX header at byte {at}; write or copy the shard again")
        if keyword.startswith(b"GNU.sparse."):
            raise FormatError(f"{name}: sparse member at byte {at}; write the shard without --sparse")
        records[keyword] = value
        text = text[length:]
    return records


def _text(path: bytes) -> str:
    # Bytes that are not UTF-8 stay tellable apart, and come back by the same rule.
    return path.decode("utf-8", "surrogateescape")


def _cut(name: str, what: str, at: int) -> FormatError:
    return FormatError(f"{name}: ends too early, inside {what} at byte {at}; write or copy the shard again")


def _not_tar(name: str, block: bytes) -> FormatError:
    hint = "; unpack it, ranges of a compressed tar cannot be read" if block.startswith(b"\x1f\x8b") else ""
    return FormatError(f"{name}: not a tar archive, it starts with {block[:16]!r}{hint}")
