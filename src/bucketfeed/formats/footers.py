"""The footers of Parquet objects: read through the cache, a few of them held parsed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]

from bucketfeed.errors import FormatError
from bucketfeed.store.manifest import Manifest
from bucketfeed.store.process import PerProcess
from bucketfeed.store.ranges import Buffer, RangeReader

_TAIL_BYTES = 64 << 10  # holds most footers; the rest of a larger one takes a second request
_AT_ONCE = 64
_MOST_PARSED = 8
_LEAST_BYTES = 12  # magic, length of the footer, magic
_AGAIN = "write it again, or remove it"


class Footers:
    """The footers of the objects of a manifest, read through the cache if there is one. Few are held parsed."""

    def __init__(self, manifest: Manifest, reader: RangeReader) -> None:
        self.manifest = manifest
        self.reader = reader
        self._parsed: PerProcess[OrderedDict[int, pq.FileMetaData]] = PerProcess(OrderedDict)

    def get(self, number: int) -> pq.FileMetaData:
        """Return the footer of object `number`."""
        parsed = self._parsed.get()
        if number not in parsed:
            parsed[number] = next(self.all([number]))
            while len(parsed) > _MOST_PARSED:
                parsed.popitem(last=False)
        return parsed[number]

    def all(self, numbers: Sequence[int]) -> Iterator[pq.FileMetaData]:
        """Yield the footers of these objects. Raises `FormatError`, which names the object that has none."""
        for at in range(0, len(numbers), _AT_ONCE):
            some = numbers[at : at + _AT_ONCE]
            for number in some:
                if (size := self.manifest.size(number)) < _LEAST_BYTES:
                    what = "is empty" if not size else f"has {size} bytes"
                    raise FormatError(f"{self.manifest.object_url(number)} {what}: no Parquet file; {_AGAIN}")
            tails = self._read([(number, _TAIL_BYTES) for number in some])
            lengths = [_length(tail, self.manifest, number) for number, tail in zip(some, tails, strict=True)]
            long = [(number, length) for number, length in zip(some, lengths, strict=True) if length > _TAIL_BYTES]
            longer = iter(self._read(long))
            for number, length, tail in zip(some, lengths, tails, strict=True):
                yield _parsed(next(longer) if length > _TAIL_BYTES else tail, self.manifest.object_url(number))

    def _read(self, tails: Sequence[tuple[int, int]]) -> list[Buffer]:
        sizes = [self.manifest.size(number) for number, _ in tails]
        return self.reader.read(
            [
                self.manifest.range(number, max(0, size - length), size)
                for (number, length), size in zip(tails, sizes, strict=True)
            ]
        )


def _length(tail: Buffer, manifest: Manifest, number: int) -> int:
    """Return the bytes of a footer with what follows it."""
    url = manifest.object_url(number)
    magic = bytes(tail[-4:])
    if magic == b"PARE":
        raise FormatError(f"{url} is an encrypted Parquet file, which can't be read; decrypt it")
    if magic != b"PAR1":
        raise FormatError(f"{url} ends with {magic!r}, not with b'PAR1': no Parquet file, or cut short; {_AGAIN}")
    length = int.from_bytes(tail[-8:-4], "little") + 8
    if length + 4 > manifest.size(number):
        raise FormatError(f"{url} says that its footer has {length} bytes, more than the file; {_AGAIN}")
    return length


def _parsed(tail: Buffer, url: str) -> pq.FileMetaData:
    try:
        return pq.read_metadata(pa.BufferReader(tail))
    except (pa.ArrowException, OSError) as e:
        raise FormatError(f"the footer of {url} is damaged: {e}; {_AGAIN}") from e


def leaves(footer: pq.FileMetaData, name: str) -> list[int]:
    """Return the numbers of the stored columns that column `name` is made of."""
    paths = (footer.schema.column(number).path for number in range(footer.num_columns))
    return [number for number, path in enumerate(paths) if path == name or path.startswith(name + ".")]
