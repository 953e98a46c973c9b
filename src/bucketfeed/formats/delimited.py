"""Objects whose rows are samples: CSV and TSV, with quoted newlines, as they lie there or compressed."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from bucketfeed.errors import ConfigError, FormatError
from bucketfeed.formats.format import Ints
from bucketfeed.formats.lines import BLOCK_BYTES, Lines, blocks, decoded, first_byte, with_compressed
from bucketfeed.formats.window import Source, StreamWindow
from bucketfeed.store.ahead import read_through
from bucketfeed.store.manifest import Manifest
from bucketfeed.store.ranges import Buffer, RangeReader

_NEWLINE, _RETURN, _QUOTE = b'\n\r"'
_HEADER_STEP_BYTES = 64 << 10
_MOST_FIELD_BYTES = 2**31 - 1
_MOST_ROW_BYTES = 256 << 20  # of one whose quotes are open: more is a quote too few, and would fill the memory
_TRUTHS = {"true": True, "1": True, "false": False, "0": False}


@dataclass(frozen=True)
class Csv(Lines):
    """Rows of comma-separated values: a field a column, text unless `dtypes` says more.

    Quotes are doubled inside of quotes, as RFC 4180 has it; quoted newlines belong to their field. Blank rows are
    passed over. `\\r\\n` ends a row as `\\n` does.

    Args:
        delimiter: one character of ASCII.
        header: whether each object begins with the names of the columns, which must be the same in all.
        columns: their names where there is no header; with one, those to keep, in this order; all where None.
        dtypes: NumPy dtypes by column, such as {"age": "int64"}; their fields are NumPy numbers.
    """

    delimiter: str = ","
    header: bool = True
    columns: tuple[str, ...] | None = None
    dtypes: Mapping[str, str] = field(default_factory=dict)
    names: tuple[str, ...] | None = field(default=None, repr=False)  # found when a data set is opened

    name: ClassVar[str] = "csv"
    suffixes: ClassVar[tuple[str, ...]] = with_compressed(".csv")

    def __post_init__(self) -> None:
        if len(self.delimiter) != 1 or self.delimiter in '"\n\r' or not self.delimiter.isascii():
            raise ConfigError(f"delimiter must be one character of ASCII, no quote or line end, not {self.delimiter!r}")
        if isinstance(self.columns, str) or not (self.columns or self.columns is None):
            raise ConfigError(f"columns must be the names of some columns, or None, not {self.columns!r}")
        if not self.header and self.columns is None:
            raise ConfigError("header=False needs columns=: nothing else names them")
        if self.columns is not None:
            object.__setattr__(self, "columns", tuple(self.columns))
        for column, dtype in self.dtypes.items():
            try:
                np.dtype(dtype)
            except TypeError as e:
                raise ConfigError(f"dtypes has {dtype!r} for column {column!r}, which is no NumPy dtype") from e
        object.__setattr__(self, "dtypes", dict(self.dtypes))

    @property
    def numbering(self) -> str:
        """The options that decide where rows end."""
        return f" {self.delimiter} {self.header}"

    @property
    def agreed(self) -> str:
        """The names in the header."""
        return repr(self.names) if self.header else ""

    def opened(self, manifest: Manifest, reader: RangeReader) -> Self:
        """Return this format with the names of all columns, read from the first object that has any."""
        names = self.columns if not self.header else self._first_header(manifest, reader)
        if names is not None:
            self._check_known(self.columns or (), names, "columns", manifest.url)
            self._check_known(self.dtypes, names, "dtypes", manifest.url)
        return replace(self, names=names)

    def scan(self, source: Source, url: str) -> Iterator[tuple[Ints, Ints]]:
        """Yield starts and stops of the rows behind the header, without their ends."""
        skip = self.header
        for starts, stops in scan_rows(source, url, ord(self.delimiter)):
            if skip:
                skip = False
                names = self._row(source.view(int(starts[0]), int(stops[0])), url, int(starts[0]))
                if self.names is not None and tuple(names) != self.names:
                    raise FormatError(
                        f"{url} has the columns {', '.join(names)}, but others before it {', '.join(self.names)}; "
                        "open objects of one kind, or give them one header"
                    )
                starts, stops = starts[1:], stops[1:]
            if len(starts):
                yield starts, stops

    def sample(self, buffer: Buffer, manifest: Manifest, shard: int, start: int) -> dict[str, Any]:
        """Return the columns of a row. Raises `FormatError` where it has more or fewer, or a value not of its dtype."""
        url = manifest.object_url(shard)
        values = self._row(decoded(buffer, manifest, shard, start), url, start)
        names = self.names or ()
        if len(values) != len(names):
            raise FormatError(
                f"{url}: the row at byte {start} has {len(values)} fields, not {len(names)}: {values!r:.100}; mend the "
                "row, or its quotes"
            )
        row = dict(zip(names, values, strict=True))
        sample: dict[str, Any] = {"__key__": f"{manifest.key(shard)}@{start}"}
        for column in self.columns or names:
            sample[column] = self._typed(column, row[column], url, start)
        return sample

    def _typed(self, column: str, text: str, url: str, start: int) -> Any:
        if column not in self.dtypes:
            return text
        dtype = np.dtype(self.dtypes[column])
        try:
            if dtype.kind == "b":
                return np.bool_(_TRUTHS[text.lower()])
            return dtype.type(int(text) if dtype.kind in "iu" else text)
        except (KeyError, ValueError, TypeError, OverflowError) as e:
            raise FormatError(
                f"{url}: the row at byte {start} has {text!r:.60} in column {column!r}, which is no "
                f"{self.dtypes[column]}; mend the row, or leave the column out of dtypes"
            ) from e

    def _row(self, text: str | Buffer, url: str, start: int) -> list[str]:
        if not isinstance(text, str):
            text = str(text, "utf-8-sig", "replace")
        if len(text) > csv.field_size_limit():
            csv.field_size_limit(_MOST_FIELD_BYTES)
        try:
            rows = list(
                csv.reader(io.StringIO(text.removesuffix("\r"), newline=""), delimiter=self.delimiter, strict=True)
            )
        except csv.Error as e:
            raise FormatError(
                f"{url}: the row at byte {start} can't be read: {e}; rows end with \\n or \\r\\n, and quotes in quotes "
                "are doubled"
            ) from e
        if len(rows) != 1:
            raise FormatError(f"{url}: carriage returns alone end rows at byte {start}; write \\n or \\r\\n instead")
        return rows[0]

    def _first_header(self, manifest: Manifest, reader: RangeReader) -> tuple[str, ...] | None:
        for shard in range(len(manifest)):
            url = manifest.object_url(shard)
            if not url.lower().endswith(self.suffixes) or not manifest.size(shard):
                continue
            buffers = read_through(reader, manifest.range(shard), _HEADER_STEP_BYTES, ahead=1)
            source = StreamWindow(self.contents(buffers, url) or buffers)
            for starts, stops in scan_rows(source, url, ord(self.delimiter)):
                names = self._row(source.view(int(starts[0]), int(stops[0])), url, int(starts[0]))
                if len(set(names)) < len(names):
                    raise FormatError(f"{url} has columns of the same name: {', '.join(names)}; rename them")
                return tuple(names)
        return None

    def _check_known(self, asked: Any, names: tuple[str, ...], option: str, url: str) -> None:
        if unknown := [column for column in asked if column not in names]:
            raise ConfigError(f"{option} names {unknown[0]!r}, and {url} has the columns {', '.join(names)}")


@dataclass(frozen=True)
class Tsv(Csv):
    """The same with tabs between the columns."""

    delimiter: str = "\t"

    name: ClassVar[str] = "tsv"
    suffixes: ClassVar[tuple[str, ...]] = with_compressed(".tsv")


def scan_rows(
    source: Source, url: str, delimiter: int, *, block_bytes: int = BLOCK_BYTES
) -> Iterator[tuple[Ints, Ints]]:
    """Yield starts and stops of the rows that are not blank, in blocks; newlines in quotes end none.

    Raises `FormatError` where quotes are never closed, and for another encoding than UTF-8.
    """
    begin = first_byte(source, url)  # of the row that is open
    opened = -1  # where the quotes that are open were opened
    before = _NEWLINE  # the byte before the block, as far as it matters
    end = passed = line = 0  # `passed`: newlines of the blocks before; `line`: where the quotes were opened
    for at, buffer in blocks(source, block_bytes):
        data = np.frombuffer(buffer, np.uint8)
        skip = max(begin - at, 0) if not at else 0  # the byte order mark
        newlines = ends = np.flatnonzero(data == _NEWLINE)
        quotes = np.flatnonzero(data == _QUOTE)
        if len(quotes) or opened >= 0:
            newlines, opened = _outside(data, newlines, quotes, at, skip, opened, before, delimiter)
            if opened >= at:
                line = passed + int(np.searchsorted(ends, opened - at)) + 1
        passed += len(ends)
        stops = newlines + at
        starts = np.concatenate([[begin], stops[:-1] + 1]) if len(stops) else stops
        if len(stops):
            begin = int(stops[-1]) + 1
            lengths = stops - starts
            # A carriage return alone is blank as well.
            previous = np.where(newlines > 0, data[np.maximum(newlines - 1, 0)], before)
            kept = (lengths > 1) | (lengths == 1) & (previous != _RETURN)
            if kept.any():
                yield starts[kept], stops[kept]
        before = int(data[-1])
        end = at + len(buffer)
        if 0 <= opened < end - _MOST_ROW_BYTES:
            break
    if opened >= 0:
        raise FormatError(
            f"{url}: the quotes opened in line {line:,}, at byte {opened}, are not closed by byte {end}; mend the row"
        )
    if end > begin and bytes(source.view(begin, min(end, begin + 2))) != b"\r":
        yield np.array([begin], np.int64), np.array([end], np.int64)


def _outside(
    data: NDArray[np.uint8], newlines: Ints, quotes: Ints, at: int, skip: int, opened: int, before: int, delimiter: int
) -> tuple[Ints, int]:
    """Return the newlines outside of quotes, and where quotes are open at the end of the block (-1: nowhere).

    By the parity of quotes where each that opens some stands at the start of a field; else one by one.
    """
    inside = int(opened >= 0)
    opening = quotes[inside::2]
    previous = np.where(opening > 0, data[np.maximum(opening - 1, 0)], before)
    starts = (previous == delimiter) | (previous == _NEWLINE) | (opening == skip) & (at == 0)
    starts |= previous == _QUOTE  # one doubled inside of quotes closes and opens them again by parity
    if starts.all():
        counts = np.searchsorted(quotes, newlines) + inside
        is_open = (len(quotes) + inside) % 2
        if not is_open:
            return newlines[counts % 2 == 0], -1
        last = int(quotes[-1]) + at if len(quotes) else opened
        return newlines[counts % 2 == 0], last
    return _one_by_one(data, newlines, quotes, at, skip, opened, before, delimiter)


def _one_by_one(
    data: NDArray[np.uint8], newlines: Ints, quotes: Ints, at: int, skip: int, opened: int, before: int, delimiter: int
) -> tuple[Ints, int]:
    """As `_outside`: quotes in the middle of a field that began without them are text."""
    kept = []
    passed = -1  # a quote that is the second of a pair
    for place in np.sort(np.concatenate([newlines, quotes])).tolist():
        if data[place] == _NEWLINE:
            if opened < 0:
                kept.append(place)
        elif place == passed:
            continue
        elif opened >= 0:
            if place + 1 < len(data) and data[place + 1] == _QUOTE:
                passed = place + 1
            else:
                opened = -1
        else:
            previous = int(data[place - 1]) if place else before
            again = place == 0 and before == _QUOTE  # a pair cut by the block's edge
            if previous in (delimiter, _NEWLINE) or again or (at == 0 and place == skip):
                opened = at + place
    return np.array(kept, np.int64), opened
