"""Parquet: rows as samples, runs of rows as chunks; what is where is told by the footers alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from bucketfeed.cache.disk import DiskCache
from bucketfeed.cache.reader import CachedReader
from bucketfeed.errors import ConfigError
from bucketfeed.formats.format import Format
from bucketfeed.store.manifest import Manifest
from bucketfeed.store.ranges import RangeReader

if TYPE_CHECKING:
    from bucketfeed.formats.parquet_index import ParquetIndex

BatchFormat = Literal["arrow", "numpy", "torch"]
_OPERATORS = ("=", "==", "!=", "<", "<=", ">", ">=", "in", "not in")


@dataclass(frozen=True)
class Parquet(Format):
    """Rows of Parquet files: each is a sample with a field for each column. Needs `bucketfeed[parquet]`.

    Args:
        columns: names of the columns to read, of the file or of its path (`year=2024/`); None takes all. Nothing else
            of the file is fetched.
        filters: which row groups to read, by their statistics, as pyarrow spells it: `[("x", ">", 3), ...]` that all
            must hold, or a list of such lists of which one must. Rows that do not match stay where others of their row
            group may; a filter on a column of the path is exact.
        batch_format: what batches of a Loader are: "arrow" (a `pyarrow.RecordBatch`), "numpy" or "torch" (a dict of
            columns), made without an object a row, and given to `collate=` whole where there is one. None gives rows to
            `decode=` and `collate=` as other formats do.
        fill: by column, the value that takes the place of nulls.

    >>> bf.open_dataset("s3://bucket/table/", format=bf.Parquet(columns=["x", "y"], batch_format="torch"))
    """

    columns: Sequence[str] | None = None
    filters: Sequence[Any] | None = None
    batch_format: BatchFormat | None = None
    fill: Mapping[str, Any] | None = None
    name: ClassVar[str] = "parquet"
    suffixes: ClassVar[tuple[str, ...]] = (".parquet", ".pq")
    indexed: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.columns is not None:
            columns = tuple(self.columns)
            if isinstance(self.columns, str) or not all(isinstance(column, str) for column in columns):
                raise ConfigError(f"columns must be a list of names, not {self.columns!r}")
            if not columns or len(set(columns)) < len(columns):
                raise ConfigError(f"columns must name at least one column, and none twice, not {self.columns!r}")
            object.__setattr__(self, "columns", columns)
        if self.batch_format not in ("arrow", "numpy", "torch", None):
            raise ConfigError(f"batch_format must be 'arrow', 'numpy', 'torch' or None, not {self.batch_format!r}")
        if self.filters is not None:
            object.__setattr__(self, "filters", _alternatives(self.filters))
        if self.fill is not None:
            if not isinstance(self.fill, Mapping) or any(value is None for value in self.fill.values()):
                raise ConfigError(f"fill must be a dict of values by column, as in {{'x': 0}}, not {self.fill!r}")
            object.__setattr__(self, "fill", dict(self.fill))

    @property
    def numbering(self) -> str:
        """The options that tell which rows there are and how they are cut into chunks."""
        return f" {self.columns!r} {self.filters!r}"

    def decodes(self, manifest: Manifest) -> bool:
        """Return True: rows are decoded, row group by row group."""
        return True

    def closed(self, manifest: Manifest, reader: RangeReader, cache: DiskCache | None) -> ParquetIndex:
        """Return the index, for which the footers are read and nothing else."""
        try:
            from bucketfeed.formats.footers import Footers
            from bucketfeed.formats.groups import find_groups
            from bucketfeed.formats.parquet_index import ParquetIndex
        except ModuleNotFoundError as e:
            raise ConfigError(f"reading {manifest.url} needs pyarrow: pip install 'bucketfeed[parquet]'") from e

        kept = reader if cache is None or reader.is_local else CachedReader(reader, cache)
        return ParquetIndex(manifest, self, *find_groups(Footers(manifest, kept), self))


def _alternatives(filters: Any) -> tuple[tuple[tuple[str, str, Any], ...], ...]:
    """Return filters as alternatives of conditions. Raises `ConfigError` where they are none."""
    said = f"filters must be like [('x', '>', 3), ('y', 'in', ['a'])] or a list of such lists, not {filters!r}"
    try:
        listed = [list(part) for part in filters]
        if listed and all(len(part) == 3 and isinstance(part[0], str) for part in listed):
            listed = [filters]
        found = tuple(tuple((str(name), op, _frozen(value)) for name, op, value in part) for part in listed)
    except (TypeError, ValueError) as e:
        raise ConfigError(said) from e
    if not found or not all(found) or isinstance(filters, str):
        raise ConfigError(said)
    for name, op, value in (condition for part in found for condition in part):
        if op not in _OPERATORS or ("in" in op) != isinstance(value, tuple):
            raise ConfigError(f"filters: {(name, op, value)!r} is none; operators are {', '.join(_OPERATORS)}")
    return found


def _frozen(value: Any) -> Any:
    return tuple(sorted(value, key=repr)) if isinstance(value, list | tuple | set | frozenset) else value
