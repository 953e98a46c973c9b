"""Consecutive samples that are read together."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from bucketfeed.errors import ConfigError
from bucketfeed.formats.format import Ints
from bucketfeed.formats.index_files import Rows, unpacked
from bucketfeed.store.ranges import Range

if TYPE_CHECKING:
    from bucketfeed.formats.index import Index

_BLOCK_ROWS = 1 << 16  # rows worked on at a time: malloc keeps the memory of larger temporaries


class Chunks:
    """Consecutive samples of one shard that are read together: those that start in the same cell of `chunk_bytes`.

    A raw object is a chunk of its own. Pickles as its index and size.

    Attributes:
        counts: samples in each chunk; or, as one int, how many chunks there are where each holds one sample.
        first: number of each chunk's first sample, and the number of samples at the end; None with an int.
    """

    def __init__(self, index: Index, chunk_bytes: int) -> None:
        if chunk_bytes < 1:
            raise ConfigError(f"chunk_bytes must be at least 1, not {chunk_bytes}")
        self.index = index
        self.chunk_bytes = chunk_bytes
        self.first: Ints | None = None
        self.counts: Ints | int = len(index)
        if index._rows is not None:
            self.first = _first_of_chunks(index._rows, chunk_bytes)
            self.counts = np.diff(self.first)

    def __len__(self) -> int:
        return len(self.index) if self.first is None else len(self.first) - 1

    def of(self, samples: Ints) -> Ints:
        """Return the chunk that each of `samples` lies in."""
        if self.first is None:
            return np.asarray(samples, np.int64)
        return np.searchsorted(self.first, samples, side="right") - 1

    def of_shard(self, shard: int) -> Iterable[int]:
        """Return the chunks of `shard`."""
        first, end = (self.index.find(which, 0) for which in (shard, shard + 1))
        if first == end:
            return ()
        chunks = self.of(np.array([first, end - 1])).tolist()
        return range(chunks[0], chunks[1] + 1)

    def range(self, c: int) -> Range:
        """Return the range of chunk `c`: from its first sample's start to its last sample's end."""
        shard, start, stop = self._span(c)
        return self.index._format.range(self.index.manifest, shard, start, stop)

    def size(self, c: int) -> int:
        """Return the bytes of chunk `c`."""
        _, start, stop = self._span(c)
        return stop - start

    @property
    def total_bytes(self) -> int:
        """The bytes of all chunks."""
        if self.first is None:
            return self.index.manifest.total_bytes
        starts, (_, last, lengths) = self.index.locate(self.first[:-1])[1], self.index.locate(self.first[1:] - 1)
        return int((last + lengths - starts).sum())

    def _span(self, c: int) -> tuple[int, int, int]:
        if not 0 <= c < len(self):
            raise IndexError(f"chunk {c} of {len(self)}")
        if self.first is None:
            return self.index._one(c)
        shard, start, _ = self.index._one(int(self.first[c]))
        _, last, length = self.index._one(int(self.first[c + 1]) - 1)
        return shard, start, last + length

    def __reduce__(self) -> tuple[type[Chunks], tuple[Index, int]]:
        return Chunks, (self.index, self.chunk_bytes)

    def __repr__(self) -> str:
        return f"Chunks({self.index!r}, chunk_bytes={self.chunk_bytes}, chunks={len(self):,})"


def _first_of_chunks(rows: Rows, chunk_bytes: int) -> Ints:
    """Return the first sample of each chunk, and the number of samples."""
    firsts = []
    before = (-1, -1)  # shard and cell of the sample before
    for at in range(0, len(rows), _BLOCK_ROWS):
        shards, starts, _ = unpacked(rows[at : at + _BLOCK_ROWS])
        cells = starts // chunk_bytes
        new = np.empty(len(shards), bool)
        new[0] = (shards[0], cells[0]) != before
        new[1:] = (shards[1:] != shards[:-1]) | (cells[1:] != cells[:-1])
        firsts.append(np.flatnonzero(new) + at)
        before = (shards[-1], cells[-1])
    return np.concatenate([*firsts, [len(rows)]]).astype(np.int64)
