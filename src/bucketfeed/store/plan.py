"""Which ranges to fetch together: near ones become one request, within a bound of waste. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from bucketfeed.store.ranges import Range

# At 20 ms to the first byte and some 100 MB/s a connection, a request costs as much as 2 MB; most of that is hidden
# by fetching in parallel, so a gap is read only where it is small.
MAX_GAP_BYTES = 64 << 10
MAX_WASTE = 0.05
MAX_BYTES = 8 << 20


class Fetch(NamedTuple):
    """One request, and which of the ranges asked for (by their places) it answers."""

    range: Range
    places: list[int]


def plan(
    ranges: Sequence[Range],
    *,
    max_gap_bytes: int = MAX_GAP_BYTES,
    max_waste: float = MAX_WASTE,
    max_bytes: int = MAX_BYTES,
) -> list[Fetch]:
    """Return the requests that cover `ranges`; empty ranges need none.

    Ranges of one object version are merged where they touch, overlap, or leave a gap of at most `max_gap_bytes`,
    while the unasked bytes stay within `max_waste` of the request and the request within `max_bytes`.
    """
    order = sorted((r.url, r.etag or "", r.start, r.stop, place) for place, r in enumerate(ranges) if r.stop > r.start)
    fetches: list[Fetch] = []
    waste = 0
    for *_, place in order:
        new = ranges[place]
        if fetches:
            last, places = fetches[-1]
            gap = max(0, new.start - last.stop)
            stop = max(last.stop, new.stop)
            if (
                (last.url, last.etag) == (new.url, new.etag)
                and gap <= max_gap_bytes
                and waste + gap <= max_waste * (stop - last.start)
                and (stop - last.start <= max_bytes or stop == last.stop)
            ):
                places.append(place)
                fetches[-1] = Fetch(last._replace(stop=stop), places)
                waste += gap
                continue
        fetches.append(Fetch(new, [place]))
        waste = 0
    return fetches
