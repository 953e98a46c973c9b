"""A range reader that looks in the disk cache first and keeps there what it fetches."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bucketfeed.cache.disk import DiskCache
from bucketfeed.cache.extent import AnyExtent, MemoryExtent
from bucketfeed.store.ranges import Buffer, Counter, Range, RangeReader


class CachedReader:
    """`inner` behind `cache`: hits come from disk, the misses of a call are fetched together, each once a node."""

    is_local = False

    def __init__(self, inner: RangeReader, cache: DiskCache) -> None:
        self.inner = inner
        self.cache = cache

    @property
    def counter(self) -> Counter:
        """The inner reader's counter; hits and misses are counted there too."""
        return self.inner.counter

    def read(self, ranges: Sequence[Range], within: Sequence[Range] | None = None) -> list[Buffer]:
        """Return the bytes of each range; see `RangeReader.read`.

        `within` names for each range a larger one, which is used where it is in the cache already.
        """
        found: dict[Range, Buffer] = {}
        missing: list[Range] = []
        hits = 0
        for place, range in enumerate(ranges):
            if range in found:
                continue
            body = self._hit(range, within[place] if within is not None else None)
            hits += body is not None
            if body is not None:
                found[range] = body
            elif range.length:
                missing.append(range)
                found[range] = b""  # so that a repeat is not fetched twice
            else:
                found[range] = b""
        if missing:
            found.update(self._fetch(missing))
        self.counter.add(cache_hits=hits, cache_misses=len(missing))
        return [found[range] for range in ranges]

    def open(self, range: Range) -> AnyExtent:
        """Return `range` as an extent that stays readable until it is closed."""
        extent, hit = self.cache.get_or_fetch(range, lambda: self.inner.read([range])[0])
        self.counter.add(cache_hits=int(hit), cache_misses=int(not hit))
        return extent

    def _hit(self, range: Range, larger: Range | None) -> Buffer | None:
        for candidate in (larger, range):
            if candidate is None or not range.length:
                continue
            extent = self.cache.get(candidate, hold=False)
            if extent is not None:
                with extent:
                    return extent.read(range.start, range.stop)
        return None

    def _fetch(self, missing: list[Range]) -> dict[Range, Buffer]:
        """Fetch what no other process is fetching, in one call, then wait for the others' extents.

        Nobody waits while holding a claim, so two such calls can't wait for each other.
        """
        claims = {range: claim for range in missing if (claim := self.cache.claim(range)) is not None}
        alone = [range for range in missing if range in claims or not self.cache.keeps(range)]
        got: dict[Range, Buffer] = {}
        try:
            if alone:
                got.update(zip(alone, self.inner.read(alone), strict=True))
            for range, claim in claims.items():
                claim.publish(got[range]).close()
        finally:
            for claim in claims.values():
                claim.abandon()
        for range in missing:
            if range not in got:
                extent, _ = self.cache.get_or_fetch(range, lambda range=range: self.inner.read([range])[0])  # type: ignore[misc]
                with extent:
                    got[range] = extent.read(range.start, range.stop)
        return got

    def __reduce__(self) -> tuple[Callable[..., CachedReader], tuple[RangeReader, DiskCache]]:
        return type(self), (self.inner, self.cache)

    def __repr__(self) -> str:
        return f"CachedReader({self.inner!r}, {self.cache!r})"


def open_extent(reader: RangeReader, range: Range) -> AnyExtent:
    """Return `range` as an extent: a cache file, an open local file, or memory where the reader has neither."""
    opener: Callable[[Range], AnyExtent] | None = getattr(reader, "open", None)
    return opener(range) if opener is not None else MemoryExtent(range, reader.read([range])[0])
