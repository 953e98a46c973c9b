"""Readers whose ranges are put together from cells of a fixed grid, each of which is one file of the cache."""

from __future__ import annotations

import builtins
import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from bucketfeed.cache.disk import DiskCache
from bucketfeed.cache.extent import AnyExtent, MemoryExtent
from bucketfeed.cache.reader import CachedReader
from bucketfeed.formats.decoded import alone
from bucketfeed.store.manifest import Manifest
from bucketfeed.store.ranges import Buffer, Counter, Range, RangeReader

if TYPE_CHECKING:
    from bucketfeed.formats.rows import ArrayIndex
    from bucketfeed.formats.sources import Files

_CELL_BYTES = 4 << 20
_CELLS_AT_ONCE = 32


class GridReader(CachedReader):
    """A `CachedReader` that asks `inner` for whole cells only, so that no byte is fetched for two ranges."""

    def _grid(self, url: str) -> tuple[int, int]:
        """Return the size of a cell, and how many bytes there are at `url`."""
        raise NotImplementedError

    def read(self, ranges: Sequence[Range], within: Sequence[Range | None] | None = None) -> list[Buffer]:
        """Return the bytes of each range, those of cells that lack fetched together."""
        pieces: list[list[Buffer]] = [[] for _ in ranges]
        wanted = [(place, cell) for place, range in enumerate(ranges) for cell in self._cells(range)]
        for first in builtins.range(0, len(wanted), _CELLS_AT_ONCE):
            some = wanted[first : first + _CELLS_AT_ONCE]
            cells = list(dict.fromkeys(cell for _, cell in some))
            with contextlib.ExitStack() as stack:
                extents = dict(zip(cells, super().open_all(cells), strict=True))
                for extent in extents.values():
                    stack.callback(extent.close)
                for place, cell in some:
                    start, stop = max(ranges[place].start, cell.start), min(ranges[place].stop, cell.stop)
                    pieces[place].append(extents[cell].read(start, stop))
        return [piece[0] if len(piece) == 1 else b"".join(piece) for piece in pieces]

    def peek(self, ranges: Sequence[Range], within: Sequence[Range]) -> list[Buffer]:
        """Return the bytes of each range as `read` does: nothing less than a cell can be made."""
        return self.read(ranges)

    def open_all(self, ranges: Sequence[Range]) -> list[AnyExtent]:
        """Return each range as an extent: a file of the cache where it is a cell, else in memory."""
        return [
            super(GridReader, self).open_all([range])[0]
            if self._cells(range) == [range]
            else MemoryExtent(range, self.read([range])[0])
            for range in ranges
        ]

    def _cells(self, range: Range) -> list[Range]:
        if not range.length:
            return []
        cell, end = self._grid(range.url)
        first = range.start - range.start % cell
        return [range._replace(start=at, stop=min(end, at + cell)) for at in builtins.range(first, range.stop, cell)]


class ObjectReader(GridReader):
    """Reads objects of a manifest in cells of 4 MiB, for what asks for small pieces of them."""

    def __init__(self, inner: RangeReader, cache: DiskCache, manifest: Manifest) -> None:
        super().__init__(inner, cache)
        self._manifest = manifest

    def _grid(self, url: str) -> tuple[int, int]:
        return _CELL_BYTES, self._manifest.size(self._manifest.find(url))

    def __reduce__(self) -> tuple[Callable[..., ObjectReader], tuple[Any, ...]]:
        return type(self), (self.inner, self.cache, self._manifest)


class RowReader(GridReader):
    """Reads rows that are made of several ranges or decoded; blocks of them are kept, each made once a node."""

    def __init__(self, reader: RangeReader, cache: DiskCache, index: ArrayIndex) -> None:
        from bucketfeed.formats.sources import Files

        kept = None if reader.is_local else ObjectReader(reader, cache, index.manifest)
        self._rows = _Rows(Files(index.manifest, reader, kept), index)
        super().__init__(self._rows, cache)
        self._made = (reader, cache, index)

    def _grid(self, url: str) -> tuple[int, int]:
        index = self._made[2]
        return index.block_bytes, int(index.shards.rows[index.shard_at(url)]) * index.row_bytes

    def _fetched(self, ranges: list[Range]) -> list[AnyExtent]:
        index = self._made[2]
        if not any(source.sequential for range in ranges for source in index.sources_at(range.url)):
            return super()._fetched(ranges)
        extents: list[AnyExtent] = []
        with contextlib.ExitStack() as stack:
            for range in ranges:
                extents.append(self._decoded(range))
                stack.callback(extents[-1].close)
            stack.pop_all()
        return extents

    def _decoded(self, wanted: Range) -> AnyExtent:
        """Decode the whole shard into the cache, unless another process has been at it, and return one block."""
        held: Buffer = b""
        with alone(self.cache, wanted.url):
            extent = self.cache.get(wanted)
            self.counter.add(cache_hits=int(extent is not None), cache_misses=int(extent is None))
            if extent is not None:
                return extent
            at = 0
            for block in self._rows.front_to_back(wanted.url):
                piece = wanted._replace(start=at, stop=at + len(block))
                at = piece.stop
                self.cache.put(piece, block)
                if piece == wanted:
                    held = block
        return self.cache.get(wanted) or MemoryExtent(wanted, held)

    def __reduce__(self) -> tuple[Callable[..., RowReader], tuple[Any, ...]]:
        return type(self), self._made


class _Rows:
    """Makes blocks of rows: a `RangeReader` of ranges that an `ArrayIndex` gives."""

    is_local = False

    def __init__(self, files: Files, index: ArrayIndex) -> None:
        self._files = files
        self._index = index

    @property
    def counter(self) -> Counter:
        """The counter of the reader of the objects."""
        return self._files.reader.counter

    def read(self, ranges: Sequence[Range]) -> list[Buffer]:
        """Return the bytes of each block of rows."""
        return [self._read(range) for range in ranges]

    def _read(self, range: Range) -> Buffer:
        start, stop = range.start // self._index.row_bytes, range.stop // self._index.row_bytes
        return self._together([source.rows(self._files, start, stop) for source in self._index.sources_at(range.url)])

    def front_to_back(self, url: str) -> Iterator[Buffer]:
        """Yield the blocks of a shard in order."""
        rows = self._index.block_bytes // self._index.row_bytes
        for parts in zip(*(source.blocks(self._files, rows) for source in self._index.sources_at(url)), strict=True):
            yield self._together(parts)

    def _together(self, parts: Sequence[np.ndarray]) -> Buffer:
        rows = np.empty(len(parts[0]), self._index.layout.record)
        for number, part in enumerate(parts):
            rows[f"f{number}"] = part
        return rows.view(np.uint8).data
