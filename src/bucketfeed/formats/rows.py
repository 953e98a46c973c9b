"""The rows of arrays by number, by arithmetic: where a row starts needs no table."""

from __future__ import annotations

import itertools
import posixpath
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from bucketfeed.errors import ConfigError
from bucketfeed.formats.format import Ints
from bucketfeed.formats.index import Chunks, Index
from bucketfeed.formats.layout import Layout, Shards
from bucketfeed.formats.samples import Bodies
from bucketfeed.store.manifest import Manifest
from bucketfeed.store.ranges import Buffer, Range

if TYPE_CHECKING:
    from bucketfeed.formats.arrays import RowFormat
    from bucketfeed.formats.sources import Source

_BLOCK_BYTES = 4 << 20  # of rows made of others: what one file of the cache holds
_MOST_BLOCK_BYTES = 64 << 20  # of one that is made larger to hold whole chunks of HDF5 or Zarr


class ArrayIndex(Index):
    """An `Index` in closed form: sample i is one row of an array, or a window of rows; windows end with their shard.

    Where `decodes`, ranges count bytes of rows that are made by `RowReader`; else they lie in the objects as they are.
    """

    def __init__(self, manifest: Manifest, format: RowFormat, layout: Layout, shards: Shards) -> None:
        super().__init__(manifest, format)
        self.layout = layout
        self.shards = shards
        self.row_bytes = layout.record.itemsize
        self.rows_per_sample = format.rows_per_sample
        self.stride = format.step
        counts = np.maximum(0, (shards.rows - self.rows_per_sample) // self.stride + 1)
        self.first: Ints = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        self._length = int(self.first[-1])
        self._finish = format.finished
        self._windowed = format.window is not None
        # Names the rows, so that none are taken for those of other fields of the same objects.
        self._tag = xxhash.xxh3_64_hexdigest(repr((layout.fields, format.numbering)).encode())

    def name(self, i: int) -> None:
        """Return None: objects hold several samples."""

    @property
    def decodes(self) -> bool:
        """Whether ranges count bytes of rows that must be made before."""
        return self.shards.sources is not None

    @property
    def batches(self) -> bool:
        """True: rows are stacked at once."""
        return True

    @property
    def block_bytes(self) -> int:
        """Bytes of rows that are made and kept together."""
        step = self.shards.step if self.shards.step * self.row_bytes <= _MOST_BLOCK_BYTES else 1
        return max(1, _BLOCK_BYTES // (self.row_bytes * step)) * step * self.row_bytes

    def locate(self, samples: Ints) -> tuple[Ints, Ints, Ints]:
        """Return object, start and length of each of `samples` (numbers from 0 on), in the order given."""
        shards, rows = self._rows_of(np.asarray(samples, np.int64))
        starts = self.shards.offsets[shards] + rows * self.row_bytes
        return self.shards.objects[shards], starts, np.full_like(starts, self.rows_per_sample * self.row_bytes)

    def span(self, shard: int, start: int, length: int) -> Range:
        """Return a range of `length` bytes of the shard that is this object."""
        plain = self.manifest.range(shard, start, start + length)
        if not self.decodes:
            return plain
        if self.shards.whole:
            return Range(self.manifest.url, start, start + length, f"{self.manifest.version}+{self._tag}")
        return plain._replace(etag=f"{plain.etag or self.manifest.version}+{self._tag}")

    def shard_at(self, url: str) -> int:
        """Return the number of the shard whose ranges have this URL."""
        return 0 if self.shards.whole else int(np.searchsorted(self.shards.objects, self.manifest.find(url)))

    def sources_at(self, url: str) -> tuple[Source, ...]:
        """Return what the fields of the shard whose ranges have this URL are read from."""
        return () if self.shards.sources is None else self.shards.sources[self.shard_at(url)]

    def find(self, shard: int, start: int) -> int:
        """Return the number of the first sample that starts at `start` of `shard` or behind it."""
        if shard >= len(self.shards.rows):
            return self._length
        sample = -(-max(0, start - int(self.shards.offsets[shard])) // (self.row_bytes * self.stride))
        return min(int(self.first[shard]) + sample, int(self.first[shard + 1]))

    def sample(self, i: int, buffer: Buffer) -> dict[str, Any]:
        """Return sample `i` made from its bytes: `"__key__"`, and a native array or value a field."""
        return {name: _first(value) for name, value in self._stacked(np.array([i]), bytearray(buffer)).items()}

    def batch(self, samples: Ints, bodies: Bodies) -> dict[str, Any]:
        """Return many samples at once: each field stacked to (batch, ...), as a list what is no array."""
        return self._stacked(samples, bodies.joined())

    def _stacked(self, samples: Ints, joined: bytearray | memoryview) -> dict[str, Any]:
        """Return samples made from their bytes, whose memory arrays use where they can."""
        rows = np.frombuffer(joined, self.layout.record)
        if self._windowed:
            rows = rows.reshape(len(samples), self.rows_per_sample)
        return {"__key__": self._keys(samples), **self._finish(self.layout.columns(rows))}

    def chunks(self, chunk_bytes: int) -> ArrayChunks:
        """Return the chunks that samples form when each shard is cut at whole rows about every `chunk_bytes`."""
        return ArrayChunks(self, chunk_bytes)

    def _keys(self, samples: Ints) -> list[str]:
        shards, rows = self._rows_of(samples)
        if self.shards.whole:
            names = {0: posixpath.basename(self.manifest.url.rstrip("/"))}
        else:
            names = {n: self.manifest.key(int(self.shards.objects[n])) for n in np.unique(shards).tolist()}
        return [f"{names[shard]}[{row}]" for shard, row in zip(shards.tolist(), rows.tolist(), strict=True)]

    def _rows_of(self, samples: Ints) -> tuple[Ints, Ints]:
        shards = np.searchsorted(self.first, samples, side="right") - 1
        return shards, (samples - self.first[shards]) * self.stride

    def _one(self, i: int) -> tuple[int, int, int]:
        if not 0 <= i < self._length:
            raise IndexError(f"sample {i} of an index of {self._length}")
        shard, start, length = (int(column[0]) for column in self.locate(np.array([i])))
        return shard, start, length

    def __reduce__(self) -> tuple[Callable[..., ArrayIndex], tuple[Any, ...]]:
        return type(self), (self.manifest, self._format, self.layout, self.shards)


def _first(value: Any) -> Any:
    return {name: _first(part) for name, part in value.items()} if isinstance(value, dict) else value[0]


class ArrayChunks(Chunks):
    """Consecutive rows or windows of one shard that are read together."""

    index: ArrayIndex
    first: Ints

    def __init__(self, index: ArrayIndex, chunk_bytes: int) -> None:
        if chunk_bytes < 1:
            raise ConfigError(f"chunk_bytes must be at least 1, not {chunk_bytes}")
        self.index = index
        self.chunk_bytes = chunk_bytes
        each = max(1, chunk_bytes // (index.row_bytes * index.stride))
        step = index.shards.step
        if each > step > 1 and index.stride == 1:
            each -= each % step
        firsts = [np.arange(a, b, each) for a, b in itertools.pairwise(index.first.tolist())]
        self.first = np.concatenate([*firsts, [len(index)]]).astype(np.int64)
        self.counts = np.diff(self.first)

    def __reduce__(self) -> tuple[type[ArrayChunks], tuple[ArrayIndex, int]]:
        return ArrayChunks, (self.index, self.chunk_bytes)

    def range(self, c: int) -> Range:
        """Return the range of chunk `c`: from its first sample's start to its last sample's end."""
        shard, start, stop = self._span(c)
        return self.index.span(shard, start, stop - start)
