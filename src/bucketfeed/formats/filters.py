"""Whether rows of an object or a row group may match a filter, by what is known of its values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pyarrow.parquet as pq  # type: ignore[import-untyped]

from bucketfeed.errors import ConfigError

Bounds = Callable[[str], "tuple[Any, Any] | bool"]  # least and most; True where nothing is known, False for nulls only


def in_path(paths: dict[int, dict[str, Any]], number: int) -> Bounds:
    """Return what the folders of an object tell of a column."""
    path = paths[number]

    def bounds(name: str) -> tuple[Any, Any] | bool:
        return True if name not in path else path[name] is not None and (path[name], path[name])

    return bounds


def in_group(
    paths: dict[int, dict[str, Any]], number: int, group: pq.RowGroupMetaData, tested: dict[str, list[int]]
) -> Bounds:
    """Return what the statistics of a row group, or its folders, tell of a column."""
    of_path = in_path(paths, number)

    def bounds(name: str) -> tuple[Any, Any] | bool:
        if name in paths[number]:
            return of_path(name)
        if not tested[name]:
            raise ConfigError(f"filters name {name!r}, which is no column of the files")
        statistics = group.column(tested[name][0]).statistics if len(tested[name]) == 1 else None
        if statistics is None:
            return True
        if statistics.has_null_count and statistics.null_count == group.num_rows:
            return False
        return (statistics.min, statistics.max) if statistics.has_min_max else True

    return bounds


def may_match(filters: Sequence[Sequence[tuple[str, str, Any]]], bounds: Bounds) -> bool:
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
