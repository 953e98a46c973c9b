"""Which row groups of Parquet objects are read, and the columns they have: told by footers and folders."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]

from bucketfeed.errors import ConfigError, FormatError
from bucketfeed.formats.columns import plain_type
from bucketfeed.formats.filters import in_group, in_path, may_match
from bucketfeed.formats.footers import Footers, leaves
from bucketfeed.formats.format import Ints
from bucketfeed.store.manifest import Manifest

if TYPE_CHECKING:
    from bucketfeed.formats.parquet import Parquet

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
    whole = [n for n in numbers if filters is None or may_match(filters, in_path(paths, n))]
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
            if rows and (filters is None or may_match(filters, in_group(paths, number, group, tested))):
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
