"""Reads for several data sets at once: each range is read by the reader of the part that it belongs to."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from bucketfeed.cache.extent import AnyExtent
from bucketfeed.cache.reader import CachedReader, open_extent
from bucketfeed.errors import ConfigError
from bucketfeed.store.ranges import Buffer, Counter, Counts, Range, RangeReader


class PartRange(Range):
    """A range that knows which part it belongs to: two parts may read the same object in different ways."""

    part: int
    own: Range  # as the part knows it

    @classmethod
    def of(cls, part: int, own: Range) -> PartRange:
        """Return `own`, of part number `part`."""
        made = tuple.__new__(cls, own)
        made.part, made.own = part, own
        return made


class PartsReader(CachedReader):
    """Reads each `PartRange` by the reader of its part, several of them at the same time."""

    def __init__(self, readers: Sequence[RangeReader]) -> None:
        self.readers = tuple(readers)
        caches = [reader.cache for reader in readers if isinstance(reader, CachedReader) and reader.cache is not None]
        # The one that parts have in common is told of each epoch; several keep what was used last.
        alone = len({cache.folder for cache in caches}) == 1
        self.cache = caches[0] if alone else None  # type: ignore[assignment]
        self.is_local = all(reader.is_local for reader in readers)
        self._counter = _Sum([*{id(reader.counter): reader.counter for reader in readers}.values()])

    @property
    def inner(self) -> PartsReader:  # type: ignore[override]
        """The readers beneath the parts' caches."""
        return type(self)([reader.inner if isinstance(reader, CachedReader) else reader for reader in self.readers])

    @property
    def counter(self) -> Counter:
        """Counts what the parts count, all together."""
        return self._counter

    def read(self, ranges: Sequence[Range], within: Sequence[Range | None] | None = None) -> list[Buffer]:
        """Return the bytes of each range; see `CachedReader.read`."""
        larger = within or [None] * len(ranges)

        def read(reader: RangeReader, places: list[int]) -> list[Buffer]:
            own = [_part(ranges[place]).own for place in places]
            if not isinstance(reader, CachedReader):
                return reader.read(own)
            return reader.read(own, within=[_own(larger[place]) for place in places])

        return self._each(ranges, read)

    def peek(self, ranges: Sequence[Range], within: Sequence[Range]) -> list[Buffer]:
        """Return the bytes of each range; see `CachedReader.peek`."""

        def peek(reader: RangeReader, places: list[int]) -> list[Buffer]:
            own = [_part(ranges[place]).own for place in places]
            if not isinstance(reader, CachedReader):
                return reader.read(own)
            return reader.peek(own, [_part(within[place]).own for place in places])

        return self._each(ranges, peek)

    def open(self, range: Range) -> AnyExtent:
        """Return `range` as an extent that stays readable until it is closed."""
        routed = _part(range)
        return open_extent(self.readers[routed.part], routed.own)

    def open_all(self, ranges: Sequence[Range]) -> list[AnyExtent]:
        """Return each range as an extent."""
        with contextlib.ExitStack() as stack:
            extents: list[AnyExtent] = []
            for range in ranges:
                extents.append(self.open(range))
                stack.callback(extents[-1].close)
            stack.pop_all()
        return extents

    def _each(self, ranges: Sequence[Range], read: Callable[[RangeReader, list[int]], list[Buffer]]) -> list[Buffer]:
        """Return what `read` gives for the places in `ranges` that each reader is asked for."""
        asked: dict[int, tuple[RangeReader, list[int]]] = {}
        for place, range in enumerate(ranges):
            reader = self.readers[_part(range).part]
            asked.setdefault(id(reader), (reader, []))[1].append(place)
        found: list[Buffer] = [b""] * len(ranges)
        with ThreadPoolExecutor(len(asked)) if len(asked) > 1 else contextlib.nullcontext() as pool:
            results = (pool.map if pool else map)(lambda one: read(*one), asked.values())
            for (_, places), buffers in zip(asked.values(), results, strict=True):
                for place, buffer in zip(places, buffers, strict=True):
                    found[place] = buffer
        return found

    def __reduce__(self) -> tuple[Callable[..., PartsReader], tuple[Any, ...]]:
        return type(self), (self.readers,)

    def __repr__(self) -> str:
        return f"PartsReader({', '.join(map(repr, self.readers))})"


class _Sum(Counter):
    """Counts by itself, and tells the sum of it and of other counters."""

    def __init__(self, parts: Sequence[Counter]) -> None:
        super().__init__()
        self._parts = parts

    def counts(self) -> Counts:
        """Return what was counted so far, here and there."""
        return sum((part.counts() for part in self._parts), super().counts())


def _part(range: Range) -> PartRange:
    if not isinstance(range, PartRange):
        raise ConfigError(f"{range} belongs to no part: take it from the index of the data set that reads it")
    return range


def _own(range: Range | None) -> Range | None:
    return None if range is None else _part(range).own
