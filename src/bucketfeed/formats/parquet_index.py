"""The rows of Parquet files by number, by arithmetic on their row groups; and what samples and batches are of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import xxhash

from bucketfeed.errors import ConfigError, FormatError
from bucketfeed.formats import columns
from bucketfeed.formats.format import Ints
from bucketfeed.formats.groups import Groups
from bucketfeed.formats.index import Chunks, Index
from bucketfeed.formats.samples import Bodies
from bucketfeed.store.manifest import Manifest
from bucketfeed.store.ranges import Buffer, Range

if TYPE_CHECKING:
    from bucketfeed.formats.parquet import Parquet

_DECODER = 1  # goes up when the same bytes are decoded to other columns
_MOST_ROWS = 1 << 16  # in a chunk: bounds what rows take that are far larger decoded than their footer lets expect


class Picked:
    """Some rows of a record batch, taken from it together; each of them stands for its bytes as a `Row`."""

    __slots__ = ("_samples", "batch", "numbers")

    def __init__(self, batch: pa.RecordBatch, numbers: Ints) -> None:
        self.batch = batch
        self.numbers = numbers
        self._samples: list[dict[str, Any]] | None = None

    def rows(self, widths: Sequence[int]) -> list[Row]:
        """Return the rows, in the order picked."""
        return [Row(self, place, width) for place, width in enumerate(widths)]

    def taken(self) -> pa.RecordBatch:
        """Return the rows as a batch of their own."""
        return self.batch.take(pa.array(self.numbers))

    def sample(self, place: int) -> dict[str, Any]:
        """Return one of the rows as Python objects; all are made when the first is asked for."""
        if self._samples is None:
            taken = self.taken()
            values = [columns.python(column) for column in taken.columns]
            names = taken.schema.names
            self._samples = [dict(zip(names, row, strict=True)) for row in zip(*values, strict=True)]
        return self._samples[place]


class Row:
    """What stands for the bytes of a row: where it is in columns. As long as the row is, about."""

    __slots__ = ("picked", "place", "width")

    def __init__(self, picked: Picked, place: int, width: int) -> None:
        self.picked = picked
        self.place = place
        self.width = width

    def __len__(self) -> int:
        return self.width


class ParquetIndex(Index):
    """An `Index` in closed form: the rows of row groups, one behind the other.

    Ranges count bytes of decoded rows, all of which in a row group are taken to have the same length.
    """

    def __init__(
        self, manifest: Manifest, format: Parquet, groups: Groups, schema: pa.Schema, of_path: tuple[str, ...]
    ) -> None:
        super().__init__(manifest, format)
        self.groups = groups
        self.schema = schema
        self.of_path = of_path
        self.fill = dict(format.fill or {})
        self.batch_format = format.batch_format
        self.first: Ints = np.concatenate([[0], np.cumsum(groups.rows)]).astype(np.int64)
        self._length = int(self.first[-1])
        ends = np.cumsum(groups.rows * groups.widths)
        starts = ends - groups.rows * groups.widths
        own = np.searchsorted(groups.shards, groups.shards)  # the first group of each one's shard
        self._bases: Ints = starts - starts[own]
        self._tag = xxhash.xxh3_64_hexdigest(
            repr((_DECODER, schema.to_string(), of_path, self.fill, format.filters)).encode()
        )

    @property
    def decodes(self) -> bool:
        """True: ranges count bytes of decoded rows."""
        return True

    @property
    def batches(self) -> bool | str:
        """True: columns are taken at once; or the format asked for."""
        return self.batch_format or True

    def name(self, i: int) -> None:
        """Return None: objects hold several samples."""

    def locate(self, samples: Ints) -> tuple[Ints, Ints, Ints]:
        """Return shard, start and length of each of `samples` (numbers from 0 on), in the order given."""
        samples = np.asarray(samples, np.int64)
        at = np.searchsorted(self.first, samples, side="right") - 1
        widths = self.groups.widths[at]
        return self.groups.shards[at], self._bases[at] + (samples - self.first[at]) * widths, widths

    def span(self, shard: int, start: int, length: int) -> Range:
        """Return a range of `length` decoded bytes of a shard, whose version also names columns and decoder."""
        plain = self.manifest.range(shard, start, start + length)
        return plain._replace(etag=f"{plain.etag or self.manifest.version}+{self._tag}")

    def numbers(self, shard: int, starts: Sequence[int]) -> Ints:
        """Return the samples of one shard that start there."""
        first = int(np.searchsorted(self.groups.shards, shard))
        stop = int(np.searchsorted(self.groups.shards, shard, side="right"))
        at = first + np.searchsorted(self._bases[first:stop], starts, side="right") - 1
        return self.first[at] + (np.asarray(starts) - self._bases[at]) // self.groups.widths[at]

    def find(self, shard: int, start: int) -> int:
        """Return the number of the first sample that starts at `start` of `shard` or behind it."""
        first = int(np.searchsorted(self.groups.shards, shard))
        if start <= 0 or first == len(self.groups.shards) or self.groups.shards[first] != shard:
            return int(self.first[first])
        found = int(self.numbers(shard, [start])[0])
        return found + int(self._one(found)[1] < start)

    def sample(self, i: int, buffer: Buffer) -> dict[str, Any]:
        """Return sample `i`: `"__key__"`, and a Python object a column."""
        row: Any = buffer
        return {"__key__": self.key(i), **row.picked.sample(row.place)}

    def key(self, i: int) -> str:
        """Return the name of sample `i`: its object's, and its row there."""
        at = int(np.searchsorted(self.first, i, side="right")) - 1
        row = i - int(self.first[at]) + int(self.groups.before[at])
        return f"{self.manifest.key(int(self.groups.shards[at]))}[{row}]"

    def batch(self, samples: Ints, bodies: Bodies) -> Any:
        """Return many samples at once, in the format asked for: columns, in the order given.

        Raises `FormatError` for a null where an array needs a value, which names column, row and option.
        """
        rows: Any = bodies.each()
        picked = list(dict.fromkeys(row.picked for row in rows))
        at = dict(zip(picked, np.cumsum([0, *(len(one.numbers) for one in picked[:-1])]).tolist(), strict=True))
        order = np.array([at[row.picked] + row.place for row in rows])
        batch = _joined([one.taken() for one in picked], self.schema)
        if not (order == np.arange(batch.num_rows)).all():
            batch = batch.take(pa.array(order))
        if self.batch_format == "arrow":
            return batch
        found: dict[str, Any] = {} if self.batch_format else {"__key__": [self.key(i) for i in samples.tolist()]}
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            try:
                values = columns.numpy(column)
            except columns.NoValueError as e:
                raise FormatError(
                    f"column {name!r} ({column.type}) has null in sample {int(samples[e.row])}, "
                    f"{self.manifest.url}{self.key(int(samples[e.row]))}, for which an array has no value: pass "
                    f"Parquet(fill={{{name!r}: ...}}), leave the column out, or take batch_format='arrow', which "
                    "keeps it"
                ) from e
            found[name] = _as_objects(values) if self.batch_format == "numpy" else _as_counts(values)
        return found

    def chunks(self, chunk_bytes: int) -> ParquetChunks:
        """Return runs of whole row groups of one file, and parts of larger ones, of about `chunk_bytes` decoded."""
        return ParquetChunks(self, chunk_bytes)

    def contents(self, buffers: Iterable[Buffer], url: str) -> None:
        """Return None: no shard is read as a whole."""

    def _one(self, i: int) -> tuple[int, int, int]:
        if not 0 <= i < self._length:
            raise IndexError(f"sample {i} of an index of {self._length}")
        shard, start, length = (int(column[0]) for column in self.locate(np.array([i])))
        return shard, start, length

    def __reduce__(self) -> tuple[Callable[..., ParquetIndex], tuple[Any, ...]]:
        return type(self), (self.manifest, self._format, self.groups, self.schema, self.of_path)


def _joined(batches: list[pa.RecordBatch], schema: pa.Schema) -> pa.RecordBatch:
    if len(batches) == 1:
        return batches[0]
    table = pa.Table.from_batches(batches, schema).combine_chunks()
    return table.to_batches()[0]


def _as_objects(values: Any) -> Any:
    """Return a list of Python objects as an array of them; lists of arrays too."""
    if isinstance(values, np.ndarray):
        return values
    found = np.empty(len(values), object)
    for place, value in enumerate(values):
        found[place] = value
    return found


def _as_counts(values: Any) -> Any:
    """Return dates and times as whole numbers of their unit, as tensors have them."""
    if isinstance(values, list):
        return [_as_counts(value) if isinstance(value, np.ndarray) else value for value in values]
    return values.view(np.int64) if values.dtype.kind in "mM" else values


class ParquetChunks(Chunks):
    """Rows that are decoded into one extent: whole row groups of a file where they are small, a part of a large one."""

    index: ParquetIndex
    first: Ints

    def __init__(self, index: ParquetIndex, chunk_bytes: int) -> None:
        if chunk_bytes < 1:
            raise ConfigError(f"chunk_bytes must be at least 1, not {chunk_bytes}")
        self.index = index
        self.chunk_bytes = chunk_bytes
        groups = index.groups
        firsts: list[int] = []
        open_shard, room, rows_left = -1, 0, 0
        for shard, start, rows, width in zip(
            groups.shards.tolist(), index.first[:-1].tolist(), groups.rows.tolist(), groups.widths.tolist(), strict=True
        ):
            if shard == open_shard and rows * width <= room and rows <= rows_left:
                room, rows_left = room - rows * width, rows_left - rows
                continue
            most = max(1, min(chunk_bytes // width, _MOST_ROWS))
            parts = -(-rows // most)
            each = -(-rows // parts)
            firsts.extend(range(start, start + rows, each))
            open_shard = shard if parts == 1 else -1
            room, rows_left = chunk_bytes - rows * width, _MOST_ROWS - rows
        self.first = np.array([*firsts, len(index)], np.int64)
        self.counts = np.diff(self.first)

    def range(self, c: int) -> Range:
        """Return the range of chunk `c`: from its first sample's start to its last sample's end."""
        shard, start, stop = self._span(c)
        return self.index.span(shard, start, stop - start)

    def __reduce__(self) -> tuple[type[ParquetChunks], tuple[ParquetIndex, int]]:
        return type(self), (self.index, self.chunk_bytes)
