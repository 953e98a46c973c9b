from __future__ import annotations

import pickle
import time

import pytest

from bucketfeed.errors import NotFoundError, ObjectChangedError, ReadError
from bucketfeed.store.ranges import Range
from bucketfeed.testing.readers import FailingReader, MemoryReader, RecordingReader, SlowReader

WANTED = Range("memory://a", 1, 3, "v1")


@pytest.fixture
def memory() -> MemoryReader:
    return MemoryReader({"memory://a": (b"abcd", "v1"), "memory://b": b"xyz"})


def test_memory_gives_bytes_of_the_version_asked_for_and_counts(memory: MemoryReader):
    assert memory.read([WANTED, Range("memory://b", 0, 3, "any")]) == [b"bc", b"xyz"]
    assert (memory.counter.counts().requests, memory.counter.counts().bytes_fetched) == (2, 5)
    with pytest.raises(ObjectChangedError, match="v2"):
        memory.read([WANTED._replace(etag="v2")])
    with pytest.raises(ObjectChangedError, match="4 bytes"):
        memory.read([WANTED._replace(stop=5)])
    with pytest.raises(NotFoundError, match="memory://c"):
        memory.read([Range("memory://c", 0, 1)])


def test_recording_keeps_the_calls_and_slow_waits_before_them(memory: MemoryReader):
    reader = SlowReader(RecordingReader(memory), 0.05)
    began = time.monotonic()
    assert reader.read([WANTED]) == [b"bc"]
    assert time.monotonic() - began >= 0.05
    assert reader.inner.calls == [[WANTED]]
    assert (reader.counter, reader.is_local) == (memory.counter, False)


def test_failing_fails_as_often_as_asked_then_works(memory: MemoryReader):
    reader = FailingReader(memory, 2)
    for _ in range(2):
        with pytest.raises(ReadError, match="memory://a"):
            reader.read([WANTED])
    assert reader.read([WANTED]) == [b"bc"]


def test_they_all_travel_to_other_processes(memory: MemoryReader):
    reader = pickle.loads(pickle.dumps(FailingReader(SlowReader(RecordingReader(memory), 0.0), 1)))
    with pytest.raises(ReadError):
        reader.read([WANTED])
    assert reader.read([WANTED]) == [b"bc"]
