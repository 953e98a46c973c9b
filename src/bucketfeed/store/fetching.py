"""From a way of fetching one range to a reader of many: planned, in parallel, retried, checked, counted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from bucketfeed.errors import ReadError
from bucketfeed.store.faults import ShortBodyError
from bucketfeed.store.plan import Fetch, plan
from bucketfeed.store.process import PerProcess
from bucketfeed.store.ranges import Buffer, Counter, Range
from bucketfeed.store.retry import Retry

_THREADS = 64  # requests in flight for one call; more gained nothing at 100 kB and 20 ms


def _make_pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_THREADS, thread_name_prefix="bucketfeed-store")


_pool = PerProcess(_make_pool)


def read_planned(
    ranges: Sequence[Range],
    fetch: Callable[[Range], Buffer],
    counter: Counter,
    *,
    retry: Retry | None = None,
    renew: Callable[[], None] | None = None,
) -> list[Buffer]:
    """Return the bytes of each range, fetched by as few requests as `plan` allows, all at the same time."""
    policy = retry or Retry()

    def fetched(one: Fetch) -> Buffer:
        return policy.call(lambda: request(one.range), str(one.range), counter, etag=one.range.etag, renew=renew)

    def request(range: Range) -> Buffer:
        counter.add(requests=1)
        body = fetch(range)
        counter.add(bytes_fetched=len(body))
        if len(body) < range.length:
            raise ShortBodyError(f"got {len(body)} of {range.length} bytes")
        if len(body) > range.length:
            raise ReadError(
                f"reading {range} gave {len(body)} bytes: the store ignores ranges; copy the data to one that does not"
            )
        return body

    fetches = plan(ranges)
    # One range, the common case of a chunk, stays in the thread that asks.
    bodies = [fetched(fetches[0])] if len(fetches) == 1 else list(_pool.get().map(fetched, fetches)) if fetches else []
    buffers: list[Buffer] = [b""] * len(ranges)
    for one, body in zip(fetches, bodies, strict=True):
        if len(one.places) == 1 and one.range.length == ranges[one.places[0]].length:
            buffers[one.places[0]] = body
            continue
        view = memoryview(body)
        for place in one.places:
            asked = ranges[place]
            buffers[place] = view[asked.start - one.range.start : asked.stop - one.range.start]
    return buffers
