"""One range from front to back, with a few requests in flight."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from bucketfeed.store.ranges import Buffer, Range, RangeReader


def read_through(reader: RangeReader, whole: Range, step_bytes: int, *, ahead: int = 4) -> Iterator[Buffer]:
    """Yield the bytes of `whole` in steps; up to `ahead` of them are fetched at the same time.

    Closing it waits for nothing: requests under way end by themselves and their bytes are dropped.
    """
    steps = [
        whole._replace(start=start, stop=min(start + step_bytes, whole.stop))
        for start in range(whole.start, whole.stop, step_bytes)
    ]
    if ahead == 1 or len(steps) == 1:
        yield from (reader.read([step])[0] for step in steps)
        return
    waiting: deque[Future[list[Buffer]]] = deque()
    pool = ThreadPoolExecutor(ahead, thread_name_prefix="bucketfeed-ahead")
    try:
        for step in steps:
            waiting.append(pool.submit(reader.read, [step]))
            if len(waiting) >= ahead:
                yield waiting.popleft().result()[0]
        while waiting:
            yield waiting.popleft().result()[0]
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
