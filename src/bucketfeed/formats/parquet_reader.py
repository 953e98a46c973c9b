"""Decodes row groups, once a node, into extents of Arrow data that all threads and processes share."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]

from bucketfeed.cache.disk import DiskCache
from bucketfeed.cache.extent import AnyExtent, MemoryExtent
from bucketfeed.cache.reader import CachedReader
from bucketfeed.errors import BucketfeedError, CacheError, FormatError
from bucketfeed.formats.column_file import ColumnFile, buffer_bytes
from bucketfeed.formats.decoded import lock_path
from bucketfeed.formats.decoding import NodeLock, Recent, Room
from bucketfeed.formats.footers import Footers, leaves
from bucketfeed.formats.format import Ints
from bucketfeed.formats.groups import partition
from bucketfeed.formats.index import Index
from bucketfeed.formats.parquet_index import ParquetIndex, Picked
from bucketfeed.store.process import PerProcess
from bucketfeed.store.ranges import Buffer, Range, RangeReader

_PIECE_BYTES = 4 << 20  # decoded, of one extent
_UNIT_BYTES = 48 << 20  # that decoding row groups takes at most, however large they are
_THREADS = 8
_FIRST_POLL_SECONDS, _LONGEST_POLL_SECONDS = 0.001, 0.05


class _Unit(NamedTuple):
    """Row groups `start` to `stop` of the index, which are decoded together into the pieces `first` to `last`."""

    start: int
    stop: int
    first: int
    last: int


class ArrowExtent(MemoryExtent):
    """Decoded rows of a shard, held in memory: reading gives a `Row` for each span, which must be that of a sample."""

    def __init__(
        self, range: Range, index: ParquetIndex, shard: int, firsts: Ints, batches: list[pa.RecordBatch]
    ) -> None:
        super().__init__(range, b"")
        self._index = index
        self._shard = shard
        self._firsts = firsts
        self._batches = batches

    def read(self, start: int, stop: int) -> Any:
        """Return the sample at `start`."""
        return self.read_all([(start, stop)])[0]

    def read_all(self, spans: Sequence[tuple[int, int]]) -> list[Any]:
        """Return the sample at each span."""
        samples = self._index.numbers(self._shard, [start for start, _ in spans])
        which = np.searchsorted(self._firsts, samples, side="right") - 1
        rows: list[Any] = [None] * len(spans)
        for number in np.unique(which).tolist():
            places = np.flatnonzero(which == number).tolist()
            picked = Picked(self._batches[number], samples[places] - self._firsts[number])
            widths = [spans[place][1] - spans[place][0] for place in places]
            for place, row in zip(places, picked.rows(widths), strict=True):
                rows[place] = row
        return rows

    def close(self) -> None:
        """Let the rows go."""
        self._batches = []
        super().close()


class ParquetReader(CachedReader):
    """A `CachedReader` of ranges as a `ParquetIndex` gives them: samples by `read`, chunks by `open`.

    What lacks in the cache is made by one process of the node, which decodes the row group and puts all of its extents
    into the cache; others that want some of them take each as soon as it is there.
    """

    def __init__(self, inner: RangeReader, cache: DiskCache, index: ParquetIndex) -> None:
        super().__init__(inner, cache)
        self._index = index
        self._pieces = index.chunks(_PIECE_BYTES)
        self._footers = Footers(index.manifest, inner if inner.is_local else CachedReader(inner, cache))
        self._recent: PerProcess[Recent] = PerProcess(Recent)
        self._room: PerProcess[Room] = PerProcess(Room)

    def read(self, ranges: Sequence[Range], within: Sequence[Range | None] | None = None) -> list[Buffer]:
        """Return the sample at each range."""
        shards = {url: self._index.manifest.find(url) for url in {range.url for range in ranges}}
        samples = np.empty(len(ranges), np.int64)
        urls = np.array([range.url for range in ranges], object)
        for url, shard in shards.items():
            places = np.flatnonzero(urls == url)
            samples[places] = self._index.numbers(shard, [ranges[place].start for place in places.tolist()])
        of = self._pieces.of(samples)
        recent = self._recent.get()
        rows: list[Any] = [None] * len(ranges)

        def fill(piece: int) -> None:
            batch = recent.get(piece, lambda: self._batch(piece))
            places = np.flatnonzero(of == piece).tolist()
            wanted = pa.array(samples[places] - int(self._pieces.first[piece]))
            picked = Picked(batch.take(wanted), np.arange(len(places)))  # so that the rest of it need not stay
            for place, row in zip(places, picked.rows([ranges[place].length for place in places]), strict=True):
                rows[place] = row

        pieces = np.unique(of).tolist()
        if len(pieces) <= 1:
            for piece in pieces:
                fill(piece)
            return rows
        with ThreadPoolExecutor(min(_THREADS, len(pieces)), thread_name_prefix="bucketfeed-parquet") as pool:
            list(pool.map(fill, pieces))
        return rows

    def peek(self, ranges: Sequence[Range], within: Sequence[Range]) -> list[Buffer]:
        """Return the sample at each range as `read` does: nothing less than a row group can be decoded."""
        return self.read(ranges)

    def open_all(self, ranges: Sequence[Range]) -> list[AnyExtent]:
        """Return each chunk with the rows in it."""
        return [self._opened(range) for range in ranges]

    def _opened(self, range: Range) -> AnyExtent:
        shard = self._index.manifest.find(range.url)
        ends = self._index.numbers(shard, [range.start, range.stop - 1])
        first, last = self._pieces.of(ends).tolist()
        batches = [self._batch(piece) for piece in np.arange(first, last + 1).tolist()]
        return ArrowExtent(range, self._index, shard, self._pieces.first[first : last + 1], batches)

    def _batch(self, piece: int) -> pa.RecordBatch:
        """Return the rows of an extent, from the cache or decoded."""
        range = self._pieces.range(piece)
        if (found := self._kept(range)) is not None:
            self.counter.add(cache_hits=1)
            return found
        pause = _FIRST_POLL_SECONDS
        while (lock := NodeLock.taken(lock_path(self.cache, f"{range.url} {self._unit(piece).start}"))) is None:
            time.sleep(pause)  # another decodes this group: each of its extents is there before all are
            pause = min(_LONGEST_POLL_SECONDS, 1.5 * pause)
            if (found := self._kept(range)) is not None:
                self.counter.add(cache_hits=1)
                return found
        with contextlib.ExitStack() as stack:
            stack.callback(lock.release)
            if (found := self._kept(range)) is not None:  # another may have been at it
                self.counter.add(cache_hits=1)
                return found
            self.counter.add(cache_misses=1)
            unit = self._unit(piece)
            made = stack.enter_context(contextlib.closing(self._made(unit)))
            for number, data in made:
                if number == piece:
                    if number < unit.last:
                        _go_on(made, stack.pop_all())
                    return _read(data)
        raise FormatError(f"{range.url} holds fewer rows than its footer says; write it again, or remove it")

    def _kept(self, range: Range) -> pa.RecordBatch | None:
        extent = self.cache.get(range, held=False, sized=False)
        if extent is None:
            return None
        try:
            with extent:
                return _read(pa.py_buffer(extent.contents()))
        except CacheError:
            return None  # the disk fails or the file was cut: the store still has it

    def _unit(self, piece: int) -> _Unit:
        """Return what the rows of a piece are decoded with."""
        ends = self._pieces.first[piece : piece + 2] - [0, 1]
        start, last = (np.searchsorted(self._index.first, ends, side="right") - 1).tolist()
        pieces = self._pieces.of(np.array([self._index.first[start], self._index.first[last + 1] - 1])).tolist()
        return _Unit(start, last + 1, *pieces)

    def _made(self, unit: _Unit) -> Generator[tuple[int, pa.Buffer]]:
        """Decode row groups; put each of their extents into the cache and yield it with its number."""
        groups = slice(unit.start, unit.stop)
        decoded = int((self._index.groups.rows[groups] * self._index.groups.widths[groups]).sum())
        with self._room.get().taken(min(decoded, _UNIT_BYTES)):
            waiting: list[pa.RecordBatch] = []
            number = unit.first
            for batch in self._decoded(unit.start, unit.stop, self._rows(number)):
                waiting.append(batch)
                while number <= unit.last and sum(b.num_rows for b in waiting) >= (rows := self._rows(number)):
                    whole = _joined(waiting)
                    data = _written(whole.slice(0, rows))
                    waiting = [whole.slice(rows)] if whole.num_rows > rows else []
                    self.cache.put(self._pieces.range(number), data, sized=False)
                    yield number, data
                    number += 1

    def _rows(self, piece: int) -> int:
        return int(self._pieces.first[piece + 1] - self._pieces.first[piece])

    def _decoded(self, start: int, stop: int, rows: int) -> Iterator[pa.RecordBatch]:
        """Yield the rows of row groups `start` to `stop`, so many at a time, with the columns that samples have."""
        index = self._index
        shard = int(index.groups.shards[start])
        numbers = index.groups.numbers[start:stop].tolist()
        of_path = partition(index.manifest.key(shard))
        stored = [name for name in index.schema.names if name not in index.of_path]
        if not stored:
            for count in index.groups.rows[start:stop].tolist():
                yield self._whole(None, count, of_path)
            return
        url = index.manifest.object_url(shard)
        footer = self._footers.get(shard)
        which = [leaf for name in stored for leaf in leaves(footer, name)]
        spans = sorted(_span(footer.row_group(number).column(leaf)) for number in numbers for leaf in which)
        with ColumnFile(lambda asked: self._pages(shard, asked), spans, index.manifest.size(shard)) as file:
            try:
                parquet = pq.ParquetFile(
                    file,
                    metadata=footer,
                    pre_buffer=False,
                    page_checksum_verification=True,  # of pages that have one
                    buffer_size=0 if file.is_small else buffer_bytes(len(spans)),
                )
                for batch in parquet.iter_batches(rows, row_groups=numbers, columns=stored, use_threads=False):
                    yield self._whole(batch, batch.num_rows, of_path)
            except (pa.ArrowException, OSError) as e:
                if file.error is not None:
                    raise file.error from e
                if isinstance(e, BucketfeedError):
                    raise
                raise FormatError(
                    f"row groups {numbers[0]} to {numbers[-1]} of {url} can't be decoded: {e}; write it again, or "
                    "remove it"
                ) from e

    def _pages(self, shard: int, spans: Sequence[tuple[int, int]]) -> list[Buffer]:
        return self.inner.read([self._index.manifest.range(shard, start, stop) for start, stop in spans])

    def _whole(self, batch: pa.RecordBatch | None, rows: int, of_path: dict[str, str | None]) -> pa.RecordBatch:
        """Return `batch` with the columns, types and order of samples, columns of the path among them."""
        arrays: list[pa.Array] = []
        for field in self._index.schema:
            if batch is None or field.name in self._index.of_path:
                text = of_path[field.name]
                value = int(text) if text is not None and pa.types.is_integer(field.type) else text
                array = pa.repeat(pa.scalar(value, field.type), rows)
            else:
                array = batch.column(field.name)
                array = array if array.type.equals(field.type) else array.cast(field.type)
            if array.null_count and field.name in self._index.fill:
                array = array.fill_null(pa.scalar(self._index.fill[field.name], field.type))
            arrays.append(array)
        return pa.RecordBatch.from_arrays(arrays, schema=self._index.schema)

    def __reduce__(self) -> tuple[Callable[..., ParquetReader], tuple[Any, ...]]:
        return type(self), (self.inner, self.cache, self._index)


def _go_on(made: Iterator[tuple[int, pa.Buffer]], done: contextlib.ExitStack) -> None:
    """Make the other extents of a row group too, while the first that was asked for is in use already."""

    def finish() -> None:
        with done, contextlib.suppress(BucketfeedError):  # whoever wants one of them meets the error itself
            while threading.main_thread().is_alive() and next(made, None) is not None:
                pass

    threading.Thread(target=finish, name="bucketfeed-parquet").start()


def _span(column: Any) -> tuple[int, int]:
    """Return where the pages of a column chunk start and stop."""
    start = column.data_page_offset
    if column.has_dictionary_page and 0 < (dictionary := column.dictionary_page_offset or 0) < start:
        start = dictionary
    return start, start + column.total_compressed_size


def _joined(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    return batches[0] if len(batches) == 1 else pa.Table.from_batches(batches).combine_chunks().to_batches()[0]


def _written(batch: pa.RecordBatch) -> pa.Buffer:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return sink.getvalue()


def _read(data: pa.Buffer) -> pa.RecordBatch:
    return pa.ipc.open_stream(data).read_next_batch()


def open_parquet(inner: RangeReader, cache: DiskCache, index: Index) -> ParquetReader:
    """Return the reader for an index of Parquet files."""
    assert isinstance(index, ParquetIndex)
    return ParquetReader(inner, cache, index)
