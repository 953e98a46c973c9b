"""What the footers of Parquet objects tell: row groups, columns and their types, which groups a filter leaves."""

from __future__ import annotations

import posixpath
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]

from bucketfeed.errors import ConfigError, FormatError
from bucketfeed.formats.columns import plain_type
from bucketfeed.formats.format import Ints
from bucketfeed.store.manifest import Manifest
from bucketfeed.store.process import PerProcess
from bucketfeed.store.ranges import Buffer, RangeReader

if TYPE_CHECKING:
    from bucketfeed.formats.parquet import Parquet

_TAIL_BYTES = 64 << 10  # holds most footers; the rest of a larger one takes a second request
_AT_ONCE = 64
_MOST_PARSED = 8
_LEAST_BYTES = 12  # magic, length of the footer, magic
_NULL = "__HIVE_DEFAULT_PARTITION__"
_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "FLOAT": 4}  # of values; 8 bytes are enough for others


@dataclass(frozen=True, eq=False)
class Groups:
    """The row groups that are read, in order, one entry of each array for each. None has 0 rows.

    Attributes:
        shards: number of the object.
        numbers: of the row group in it.
        rows: how many there are.
        before: rows of the object before it.
        widths: bytes that a row takes once it is decoded, about.
    """

    shards: Ints
    numbers: Ints
    rows: Ints
    before: Ints
    widths: Ints


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


_AGAIN = "write it again, or remove it"


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


def partition(key: str) -> dict[str, str | None]:
    """Return the columns that the folders of a key name, as in `year=2024/`."""
    pairs = [part.partition("=") for part in posixpath.dirname(key).split("/") if "=" in part]
    return {unquote(name): None if value == _NULL else unquote(value) for name, _, value in pairs if name}


def find_groups(footers: Footers, format: Parquet) -> tuple[Groups, pa.Schema, tuple[str, ...]]:
    """Return the row groups to read, the columns of a row, and which of them are those of the path."""
    manifest = footers.manifest
    numbers = _shards(manifest, format)
    paths = _partitions(manifest, numbers)
    filters: Any = format.filters
    whole = [n for n in numbers if filters is None or _may_match(filters, _in_path(paths, n))]
    names: Schema = Schema(manifest, format, paths)
    found: list[tuple[int, int, int, int, int]] = []
    for number, footer in zip(whole, footers.all(whole), strict=True):
        names.add(number, footer)
        stored = [leaf for name in names.stored for leaf in leaves(footer, name)]
        tested = {name: leaves(footer, name) for part in filters or () for name, _, _ in part}
        before = 0
        for place in range(footer.num_row_groups):
            group = footer.row_group(place)
            rows = group.num_rows
            if rows and (filters is None or _may_match(filters, _in_group(paths, number, group, tested))):
                size = sum(_decoded_bytes(group.column(leaf)) for leaf in stored) + 8 * len(names.of_path)
                found.append((number, place, rows, before, max(1, -(-size // rows))))
            before += rows
    columns = np.array(found, np.int64).reshape(-1, 5).T
    return Groups(*(np.ascontiguousarray(column) for column in columns)), names.schema(), names.of_path


def _shards(manifest: Manifest, format: Parquet) -> list[int]:
    keys = [(n, posixpath.basename(manifest.key(n) or manifest.url)) for n in range(len(manifest))]
    named = [n for n, name in keys if name.lower().endswith(format.suffixes) and name[0] not in "._"]
    return named or [n for n, name in keys if name[:1] not in (".", "_")]


def _decoded_bytes(column: Any) -> int:
    width = _WIDTHS.get(column.physical_type, 8)
    if column.physical_type == "BYTE_ARRAY":
        statistics = column.statistics if column.has_dictionary_page else None
        ends = [statistics.min, statistics.max] if statistics is not None and statistics.has_min_max else []
        texts = [end for end in ends if isinstance(end, str | bytes)]  # each may stand for many values
        width = 4 + sum(map(len, texts)) // 2
    return max(int(column.total_uncompressed_size), int(column.num_values) * width)


class Schema:
    """The columns that all objects have together, each with one type that holds what is in every one of them."""

    def __init__(self, manifest: Manifest, format: Parquet, paths: dict[int, dict[str, Any]]) -> None:
        self._manifest = manifest
        self._format = format
        first: dict[str, Any] = next(iter(paths.values()), {})
        self._paths = {name: [path[name] for path in paths.values()] for name in first}
        self._fields: dict[str, tuple[pa.DataType, int]] = {}  # with the object that it was found in
        self._empty: list[tuple[int, pq.FileMetaData]] = []
        self._last: Any = None
        self._settled = False

    @property
    def stored(self) -> list[str]:
        """The columns that are read from the objects."""
        return list(self._fields)

    @property
    def of_path(self) -> tuple[str, ...]:
        """The columns that folders name."""
        wanted = self._format.columns
        return tuple(name for name in self._paths if wanted is None or name in wanted)

    def add(self, number: int, footer: pq.FileMetaData) -> None:
        """Take in the columns of an object. Raises `FormatError` where they do not fit those seen before."""
        if not footer.num_rows:
            self._empty = [(number, footer)]  # writers often do not know the types of no values
            return
        schema = footer.schema.to_arrow_schema()
        if self._last is not None and schema.equals(self._last):
            return
        self._last = schema
        self._take(number, schema)

    def _take(self, number: int, schema: pa.Schema) -> None:
        url = self._manifest.object_url(number)
        wanted = self._format.columns
        if len(set(schema.names)) < len(schema.names):
            raise FormatError(f"{url} has two columns of one name: {schema.names}; rename one of them")
        if wanted is not None and (absent := [n for n in wanted if n not in schema.names and n not in self._paths]):
            raise ConfigError(f"{url} has no column {absent[0]!r}; it has {[*schema.names, *self._paths]}")
        types = {
            field.name: plain_type(field.type)
            for field in schema
            if field.name not in self._paths and (wanted is None or field.name in wanted)
        }
        if not self._settled:
            self._settled = True
            self._fields = {name: (type, number) for name, type in types.items()}
            return
        for name in self._fields.keys() ^ types.keys():
            has, lacks = (self._fields[name][1], number) if name in self._fields else (number, self._first)
            raise FormatError(
                f"{self._manifest.object_url(has)} has column {name!r} and {self._manifest.object_url(lacks)} has "
                f"none; pass columns= with those that all files have"
            )
        for name, type in types.items():
            known, origin = self._fields[name]
            if (both := _common(known, type)) is None:
                raise FormatError(
                    f"column {name!r} is {known} in {self._manifest.object_url(origin)} and {type} in {url}; write "
                    "the files with one type, or pass columns= without it"
                )
            self._fields[name] = (both, origin)

    @property
    def _first(self) -> int:
        return next((number for _, number in self._fields.values()), 0)

    def schema(self) -> pa.Schema:
        """Return all columns of a row. Raises `ConfigError` for options about columns that are not there."""
        if not self._settled and self._empty:
            self._take(self._empty[0][0], self._empty[0][1].schema.to_arrow_schema())
        types = {name: type for name, (type, _) in self._fields.items()}
        types |= {name: _type_of(self._paths[name]) for name in self.of_path}
        if self._settled:
            for name in self._format.fill or ():
                if name not in types:
                    raise ConfigError(f"fill names {name!r}, but columns are {list(types)}")
            for name, value in (self._format.fill or {}).items():
                try:
                    pa.scalar(value, types[name])
                except (pa.ArrowException, TypeError, ValueError, OverflowError) as e:
                    raise ConfigError(f"fill={{{name!r}: {value!r}}} does not fit {types[name]}: {e}") from e
        order = [name for name in self._format.columns or types if name in types]
        return pa.schema([pa.field(name, types[name]) for name in order])


def _common(a: pa.DataType, b: pa.DataType) -> pa.DataType | None:
    """Return the type that holds all values of both; None where there is none that changes none of them."""
    if a.equals(b):
        return a
    is_alike: tuple[Callable[[pa.DataType], bool], ...] = (
        pa.types.is_integer,
        pa.types.is_floating,
        lambda t: pa.types.is_string(t) or pa.types.is_large_string(t),
        lambda t: pa.types.is_binary(t) or pa.types.is_large_binary(t),
        lambda t: pa.types.is_timestamp(t),
        lambda t: pa.types.is_decimal(t),
    )
    null = pa.types.is_null(a) or pa.types.is_null(b)
    if not null and not any(alike(a) and alike(b) for alike in is_alike):
        return None
    try:
        pair = [pa.schema([pa.field("x", type)]) for type in (a, b)]
        return pa.unify_schemas(pair, promote_options="permissive").field(0).type
    except pa.ArrowException:
        return None


def _partitions(manifest: Manifest, numbers: Sequence[int]) -> dict[int, dict[str, Any]]:
    """Return the columns that the path of each object names: whole numbers where all of a name are, else text."""
    paths: dict[int, dict[str, Any]] = {number: dict(partition(manifest.key(number))) for number in numbers}
    for number, path in paths.items():
        if path.keys() != paths[numbers[0]].keys():
            raise FormatError(
                f"the folders of {manifest.object_url(numbers[0])} name the columns {list(paths[numbers[0]])}, those "
                f"of {manifest.object_url(number)} {list(path)}; open a narrower prefix"
            )
    for name in paths[numbers[0]] if numbers else ():
        if pa.types.is_integer(_type_of([path[name] for path in paths.values()])):
            for path in paths.values():
                path[name] = None if path[name] is None else int(path[name])
    return paths


def _type_of(values: Sequence[Any]) -> pa.DataType:
    texts = {str(value) for value in values if value is not None}
    whole = texts and all(re.fullmatch(r"-?[0-9]{1,18}", text) for text in texts)
    return pa.int64() if whole else pa.string()


_Bounds = Callable[[str], "tuple[Any, Any] | bool"]  # least and most; True where nothing is known, False for nulls only


def _in_path(paths: dict[int, dict[str, Any]], number: int) -> _Bounds:
    path = paths[number]

    def bounds(name: str) -> tuple[Any, Any] | bool:
        return True if name not in path else path[name] is not None and (path[name], path[name])

    return bounds


def _in_group(
    paths: dict[int, dict[str, Any]], number: int, group: pq.RowGroupMetaData, tested: dict[str, list[int]]
) -> _Bounds:
    in_path = _in_path(paths, number)

    def bounds(name: str) -> tuple[Any, Any] | bool:
        if name in paths[number]:
            return in_path(name)
        if not tested[name]:
            raise ConfigError(f"filters name {name!r}, which is no column of the files")
        statistics = group.column(tested[name][0]).statistics if len(tested[name]) == 1 else None
        if statistics is None:
            return True
        if statistics.has_null_count and statistics.null_count == group.num_rows:
            return False
        return (statistics.min, statistics.max) if statistics.has_min_max else True

    return bounds


def _may_match(filters: Sequence[Sequence[tuple[str, str, Any]]], bounds: _Bounds) -> bool:
    """Return whether some row may match one of the alternatives, all of whose conditions it must."""
    return any(all(_may_hold(bounds(name), name, op, value) for name, op, value in part) for part in filters)


def _may_hold(bounds: tuple[Any, Any] | bool, name: str, op: str, value: Any) -> bool:
    if isinstance(bounds, bool):
        return bounds
    least, most = bounds
    try:
        match op:
            case "=" | "==":
                return bool(least <= value <= most)
            case "!=":
                return not least == value == most
            case "<":
                return bool(least < value)
            case "<=":
                return bool(least <= value)
            case ">":
                return bool(most > value)
            case ">=":
                return bool(most >= value)
            case "in":
                return any(least <= one <= most for one in value)
            case _:
                return not (least == most and least in value)
    except TypeError as e:
        raise ConfigError(f"filters compare column {name!r} with {value!r}, but it holds {least!r}: {e}") from e
