"""A range reader that looks in the disk cache first and keeps there what it fetches."""

from __future__ import annotations

import builtins
import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from bucketfeed.cache.disk import DiskCache
from bucketfeed.cache.extent import AnyExtent, MemoryExtent
from bucketfeed.errors import CacheError
from bucketfeed.store.ranges import Buffer, Counter, Range, RangeReader

_AT_ONCE = 128  # misses fetched together, each an open file: stays far below the usual limit of 1,024 a process


class CachedReader:
    """`inner` behind `cache`: hits come from disk, the misses of a call are fetched together, each once a node.

    Ranges without an etag pass through: without a version there is nothing to keep them under.
    """

    is_local = False

    def __init__(self, inner: RangeReader, cache: DiskCache) -> None:
        self.inner = inner
        self.cache = cache

    @property
    def counter(self) -> Counter:
        """The inner reader's counter; hits and misses are counted there too."""
        return self.inner.counter

    def read(self, ranges: Sequence[Range], within: Sequence[Range | None] | None = None) -> list[Buffer]:
        """Return the bytes of each range; see `RangeReader.read`.

        `within` names for each range a larger one, or None; the larger is used where it is in the cache already.
        """
        found: dict[Range, Buffer] = {}
        missing: list[Range] = []
        for range, larger in zip(ranges, within or [None] * len(ranges), strict=True):
            if range in found:
                continue
            body = self._hit(range, larger) if range.length else b""
            if body is None:
                missing.append(range)
                body = b""  # until it comes; a repeat is not fetched twice
            found[range] = body
        self.counter.add(cache_hits=sum(range.length > 0 for range in found) - len(missing))
        for first in builtins.range(0, len(missing), _AT_ONCE):
            some = missing[first : first + _AT_ONCE]
            for range, extent in zip(some, self._fetched(some), strict=True):
                with extent:
                    found[range] = extent.read(range.start, range.stop)
        return [found[range] for range in ranges]

    def peek(self, ranges: Sequence[Range], within: Sequence[Range]) -> list[Buffer]:
        """Return the bytes of each range as `read` does, and keep nothing: the larger ranges are on their way."""
        bodies = [self._hit(range, larger) for range, larger in zip(ranges, within, strict=True)]
        missing = [range for range, body in zip(ranges, bodies, strict=True) if body is None]
        self.counter.add(cache_hits=len(ranges) - len(missing), cache_misses=len(missing))
        fetched = iter(self.inner.read(missing))
        return [next(fetched) if body is None else body for body in bodies]

    def open(self, range: Range) -> AnyExtent:
        """Return `range` as an extent that stays readable until it is closed."""
        return self.open_all([range])[0]

    def open_all(self, ranges: Sequence[Range]) -> list[AnyExtent]:
        """Return each range, none of them twice, as an extent; those that lack in the cache are fetched together."""
        found: dict[Range, AnyExtent] = {}
        with contextlib.ExitStack() as stack:
            for range in ranges:
                if (hit := self.cache.get(range)) is not None:
                    found[range] = stack.enter_context(hit)
            self.counter.add(cache_hits=len(found))
            missing = [range for range in ranges if range not in found]
            found.update(zip(missing, self._fetched(missing), strict=True))
            stack.pop_all()
        return [found[range] for range in ranges]

    def _fetched(self, ranges: list[Range]) -> list[AnyExtent]:
        misses = 0

        def fetch(unclaimed: list[Range]) -> list[Buffer]:
            nonlocal misses
            misses += len(unclaimed)
            return self.inner.read(unclaimed)

        extents = self.cache.fetch(ranges, fetch)
        self.counter.add(cache_hits=len(ranges) - misses, cache_misses=misses)  # what others fetched is a hit
        return extents

    def _hit(self, range: Range, larger: Range | None) -> Buffer | None:
        for candidate in (larger, range):
            extent = None if candidate is None else self.cache.get(candidate, held=False)
            if extent is not None:
                try:
                    with extent:
                        return extent.read(range.start, range.stop)
                except CacheError:
                    continue  # the disk fails or the file was cut: the store still has it
        return None

    def __reduce__(self) -> tuple[Callable[..., CachedReader], tuple[Any, ...]]:
        return type(self), (self.inner, self.cache)

    def __repr__(self) -> str:
        return f"CachedReader({self.inner!r}, {self.cache!r})"


def open_extent(reader: RangeReader, range: Range) -> AnyExtent:
    """Return `range` as an extent: a cache file, an open local file, or memory where the reader has neither."""
    opener: Callable[[Range], AnyExtent] | None = getattr(reader, "open", None)
    return opener(range) if opener is not None else MemoryExtent(range, reader.read([range])[0])
