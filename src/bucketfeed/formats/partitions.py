"""Partitions of a Dask array or data frame as shards: computed where they are needed, kept like decompressed data."""

from __future__ import annotations

import functools
import pickle
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import cloudpickle
import numpy as np

from bucketfeed.errors import DecodeError, FormatError
from bucketfeed.formats.format import Format, Ints, in_blocks
from bucketfeed.formats.window import Source
from bucketfeed.store.manifest import Manifest
from bucketfeed.store.ranges import Buffer

_LENGTH = struct.Struct("<Q")
_STEP_BYTES = 4 << 20


@dataclass(frozen=True)
class Partitions(Format):
    """Each partition of the Dask collection whose graph lies at `graph` is a shard."""

    graph: Path
    name: ClassVar[str] = "dask"

    def decodes(self, manifest: Manifest) -> bool:
        """Return True: partitions are computed, not read."""
        return True

    def contents(self, buffers: Iterable[Buffer], url: str) -> Iterator[Buffer]:
        """Yield the rows of the partition at `url` as bytes; it is computed when the first is asked for."""
        number = int(url.rpartition("/")[2])
        try:
            value = _delayed(self.graph)[number].compute(scheduler="synchronous")
        except Exception as e:
            raise DecodeError(f"partition {number} of {url} can't be computed: {type(e).__name__}: {e}") from e
        yield from self.encoded(value, url)

    def encoded(self, value: Any, url: str) -> Iterator[Buffer]:
        """Yield the rows of a computed partition as bytes."""
        raise NotImplementedError


@dataclass(frozen=True)
class ArrayRows(Partitions):
    """Rows of an array, as its bytes: field `data` of `dtype` and `shape`."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return int(np.dtype(self.dtype).itemsize * np.prod(self.shape, dtype=np.int64))

    def encoded(self, value: Any, url: str) -> Iterator[Buffer]:
        """Yield the block's bytes. Raises `FormatError` where it is not what its array says."""
        block = np.ascontiguousarray(value)
        if block.dtype != np.dtype(self.dtype) or block.shape[1:] != self.shape:
            raise FormatError(
                f"{url} was computed as {block.dtype}{block.shape}, not as rows of {self.dtype}{self.shape}: "
                "give the array its true meta"
            )
        whole = block.reshape(-1).view(np.uint8).data
        yield from (whole[at : at + _STEP_BYTES] for at in range(0, len(whole), _STEP_BYTES))

    def scan(self, source: Source, url: str) -> Iterator[tuple[Ints, Ints]]:
        """Yield starts and stops of the rows."""
        size = self.row_bytes

        def rows() -> Iterator[tuple[int, int]]:
            at = 0
            while len(source.view(at, at + size)) == size:
                yield at, at + size
                at += size

        return in_blocks(rows())

    def sample(self, buffer: Buffer, manifest: Manifest, shard: int, start: int) -> dict[str, Any]:
        """Return a row of partition `shard`, writable."""
        row = np.frombuffer(bytearray(buffer), np.dtype(self.dtype)).reshape(self.shape)
        return {"__key__": f"{shard}/{start // self.row_bytes}", "data": row}


@dataclass(frozen=True)
class FrameRows(Partitions):
    """Rows of a data frame: a field for each column; its index is left out."""

    columns: tuple[str, ...]

    def encoded(self, value: Any, url: str) -> Iterator[Buffer]:
        """Yield each row pickled, behind its length."""
        for row in value.itertuples(index=False, name=None):
            body = pickle.dumps(row, protocol=5)
            yield _LENGTH.pack(len(body)) + body

    def scan(self, source: Source, url: str) -> Iterator[tuple[Ints, Ints]]:
        """Yield starts and stops of the pickled rows, without their lengths."""

        def rows() -> Iterator[tuple[int, int]]:
            at = 0
            while head := source.view(at, at + _LENGTH.size):
                start = at + _LENGTH.size
                at = start + _LENGTH.unpack(head)[0]
                source.view(start, at)
                yield start, at

        return in_blocks(rows())

    def sample(self, buffer: Buffer, manifest: Manifest, shard: int, start: int) -> dict[str, Any]:
        """Return a row of partition `shard`."""
        return {"__key__": f"{shard}@{start}", **dict(zip(self.columns, pickle.loads(buffer), strict=True))}


@functools.lru_cache(maxsize=4)
def _delayed(graph: Path) -> list[Any]:
    found: list[Any] = cloudpickle.loads(graph.read_bytes())
    return found
