"""Range readers for tests: from memory, and wrappers that record, delay or fail."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from bucketfeed.errors import NotFoundError, ObjectChangedError, ReadError
from bucketfeed.store.ranges import Buffer, Counter, Range, RangeReader


class MemoryReader:
    """Reads from a dict of url to bytes, or to (bytes, etag)."""

    is_local = False

    def __init__(self, objects: Mapping[str, bytes | tuple[bytes, str]]) -> None:
        self.objects = dict(objects)
        self.counter = Counter()

    def read(self, ranges: Sequence[Range]) -> list[Buffer]:
        """Return the bytes of each range; one request each."""
        return [self._read(range) for range in ranges]

    def _read(self, range: Range) -> bytes:
        if range.url not in self.objects:
            raise NotFoundError(f"{range} is not there; put it into MemoryReader.objects")
        found = self.objects[range.url]
        data, etag = (found, None) if isinstance(found, bytes) else found
        if range.etag is not None and etag is not None and etag != range.etag:
            raise ObjectChangedError(f"{range.url} changed: wanted etag {range.etag}, found {etag}")
        if range.stop > len(data):
            raise ObjectChangedError(f"{range} ends behind the object's {len(data)} bytes")
        body = data[range.start : range.stop]
        if range.length:
            self.counter.add(requests=1, bytes_fetched=len(body))
        return body


class _Wrapper:
    def __init__(self, inner: RangeReader) -> None:
        self.inner = inner

    @property
    def is_local(self) -> bool:
        """Whether the data lies on this machine."""
        return self.inner.is_local

    @property
    def counter(self) -> Counter:
        """The inner reader's counter."""
        return self.inner.counter


class RecordingReader(_Wrapper):
    """Keeps every call in `calls`, a list of lists of ranges."""

    def __init__(self, inner: RangeReader) -> None:
        super().__init__(inner)
        self.calls: list[list[Range]] = []

    def read(self, ranges: Sequence[Range]) -> list[Buffer]:
        """Record, then read."""
        self.calls.append(list(ranges))
        return self.inner.read(ranges)


class SlowReader(_Wrapper):
    """Waits `seconds` before each call."""

    def __init__(self, inner: RangeReader, seconds: float) -> None:
        super().__init__(inner)
        self.seconds = seconds

    def read(self, ranges: Sequence[Range]) -> list[Buffer]:
        """Wait, then read."""
        time.sleep(self.seconds)
        return self.inner.read(ranges)


class FailingReader(_Wrapper):
    """Fails the first `fail_first` calls in each process with a `ReadError`, then works."""

    def __init__(self, inner: RangeReader, fail_first: int) -> None:
        super().__init__(inner)
        self.fail_first = fail_first

    def read(self, ranges: Sequence[Range]) -> list[Buffer]:
        """Fail or read."""
        if self.fail_first > 0:
            self.fail_first -= 1
            raise ReadError(f"reading {ranges[0]} failed, as the test asked")
        return self.inner.read(ranges)
