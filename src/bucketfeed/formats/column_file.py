"""Column chunks of row groups as a file, fetched together and in rounds, so that few of their bytes are in memory."""

from __future__ import annotations

import bisect
import io
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from bucketfeed.errors import BucketfeedError
from bucketfeed.store.ranges import Buffer

ROUND_BYTES = 8 << 20  # fetched at a time; as much is read from meanwhile
_LEAST_PART = 64 << 10
_LEAST_BUFFER, _MOST_BUFFER = 16 << 10, 1 << 20

Span = tuple[int, int]


def buffer_bytes(columns: int) -> int:
    """Return how much of each of so many columns to read at a time."""
    return max(_LEAST_BUFFER, min(_MOST_BUFFER, ROUND_BYTES // (2 * columns)))


class ColumnFile(io.RawIOBase):
    """A file of which the `spans` are read, each from front to back, all at about the same pace.

    What was read of a span is let go of. Whatever lies outside of the spans is fetched when it is asked for.

    Args:
        fetch: returns the bytes of each of some spans, fetched at the same time.
        spans: start and stop of each, sorted, none within another.
        size: bytes of the whole file.
    """

    def __init__(self, fetch: Callable[[Sequence[Span]], list[Buffer]], spans: Sequence[Span], size: int) -> None:
        super().__init__()
        self._fetch = fetch
        self._size = size
        self._at = 0
        self._starts = [start for start, _ in spans]
        total = max(1, sum(stop - start for start, stop in spans))
        self.is_small = total <= ROUND_BYTES
        self._spans = [_Span(start, stop, self._part(stop - start, total)) for start, stop in spans]
        self._pool = None if self.is_small else ThreadPoolExecutor(1, thread_name_prefix="bucketfeed-columns")
        self._coming: tuple[list[tuple[_Span, Span]], Future[list[Buffer]]] | None = None
        self.error: BucketfeedError | None = None  # what a read failed with, which pyarrow may give another type

    def _part(self, length: int, total: int) -> int:
        return length if self.is_small else max(_LEAST_PART, length * ROUND_BYTES // total)

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return where the next read starts."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to `offset` from the start, the place reached, or the end; return where that is."""
        self._at = max(0, offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence])
        return self._at

    def read(self, size: int = -1) -> Any:
        """Return the next `size` bytes, or all up to the end."""
        stop = self._size if size < 0 else min(self._size, self._at + size)
        start, self._at = self._at, max(self._at, stop)
        if stop <= start:
            return b""
        try:
            return self._bytes(start, stop)
        except BucketfeedError as e:
            self.error = e
            raise

    def _bytes(self, start: int, stop: int) -> Buffer:
        place = bisect.bisect_right(self._starts, start) - 1
        span = self._spans[place] if place >= 0 else None
        if span is None or stop > span.stop or start < span.first:  # such as the bytes around a span
            return self._fetch([(start, stop)])[0]
        while span.loaded < stop:
            self._load(span, stop)
        found = span.view(start, stop)
        self._announce()
        return found

    def _load(self, span: _Span, stop: int) -> None:
        """Get more of `span`: what is on its way, or else this and what other spans are short of."""
        if self._coming is not None:
            coming, self._coming = self._coming, None
            for (one, _), data in zip(coming[0], coming[1].result(), strict=True):
                one.append(data)
            return
        asked = [(span, (span.loaded, max(min(stop, span.stop), min(span.stop, span.loaded + span.part))))]
        asked += [(one, one.next) for one in self._spans if one is not span and one.is_short]
        for (one, _), data in zip(asked, self._fetch([piece for _, piece in asked]), strict=True):
            one.append(data)

    def _announce(self) -> None:
        """Begin to fetch what spans will soon be short of."""
        if self._pool is not None and self._coming is None:
            asked = [(one, one.next) for one in self._spans if one.is_short]
            if sum(stop - start for _, (start, stop) in asked) >= ROUND_BYTES // 2:
                self._coming = asked, self._pool.submit(self._fetch, [piece for _, piece in asked])

    def close(self) -> None:
        """Let all go."""
        if not self.closed:
            if getattr(self, "_pool", None) is not None:
                self._pool.shutdown(wait=False, cancel_futures=True)  # type: ignore[union-attr]
            self._spans = []
        super().close()


class _Span:
    """What is held of a span: `first` to `loaded`, of which `read` is where reading has come."""

    __slots__ = ("first", "loaded", "part", "parts", "read", "stop")

    def __init__(self, start: int, stop: int, part: int) -> None:
        self.first = self.read = self.loaded = start
        self.stop = stop
        self.part = part
        self.parts: deque[tuple[int, Buffer]] = deque()

    @property
    def is_short(self) -> bool:
        """Whether less than a part of it is held unread, and there is more."""
        return self.loaded < self.stop and self.loaded - self.read < self.part

    @property
    def next(self) -> Span:
        """Where its next part lies."""
        return self.loaded, min(self.stop, self.loaded + self.part)

    def append(self, data: Buffer) -> None:
        """Take in what follows."""
        self.parts.append((self.loaded, data))
        self.loaded += len(data)

    def view(self, start: int, stop: int) -> Buffer:
        """Return bytes that are held, and let go of the parts before them."""
        while self.parts and self.parts[0][0] + len(self.parts[0][1]) <= start:
            at, part = self.parts.popleft()
            self.first = at + len(part)
        self.read = stop
        pieces = [part[max(start - at, 0) : stop - at] for at, part in self.parts if at < stop]
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)
