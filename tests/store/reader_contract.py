"""What every `RangeReader` promises. A test class inherits `ReaderContract` and gives the fixture `place`."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from bucketfeed.errors import NotFoundError, ObjectChangedError
from bucketfeed.store.ranges import Range, RangeReader

DATA = bytes(range(256)) * 400


@dataclass
class Place:
    """A reader, and how to write an object where it reads; `put` returns the object's url and etag."""

    reader: RangeReader
    put: Callable[[str, bytes], tuple[str, str]]


class ReaderContract:
    @pytest.fixture
    def place(self) -> Place:
        raise AssertionError("give the fixture `place`")

    def test_ranges_come_in_the_order_asked_exactly_as_long(self, place: Place):
        url, etag = place.put("a.bin", DATA)
        other, other_etag = place.put("b/c.bin", DATA[::-1])
        asked = [(url, 5, 10), (url, 0, 4), (other, 7, 9), (url, 5, 10), (url, 90_000, len(DATA)), (url, 4, 5)]
        ranges = [Range(u, start, stop, etag if u == url else other_etag) for u, start, stop in asked]
        expected = [(DATA if u == url else DATA[::-1])[start:stop] for u, start, stop in asked]
        for _ in range(2):
            assert [bytes(b) for b in place.reader.read(ranges)] == expected

    def test_no_ranges_and_empty_ranges_need_no_request(self, place: Place):
        url, etag = place.put("a.bin", DATA)
        before = place.reader.counter.counts().requests
        assert place.reader.read([]) == []
        assert [bytes(b) for b in place.reader.read([Range(url, 3, 3, etag)] * 2)] == [b"", b""]
        assert place.reader.counter.counts().requests == before

    def test_an_empty_object_is_empty_bytes_c032(self, place: Place):
        url, etag = place.put("empty.bin", b"")
        one, one_etag = place.put("one.bin", b"\0")
        got = place.reader.read([Range(url, 0, 0, etag), Range(one, 0, 1, one_etag), Range(url, 0, 0, etag)])
        assert [bytes(b) for b in got] == [b"", b"\0", b""]

    def test_a_missing_object_is_named(self, place: Place):
        url, _ = place.put("a.bin", DATA)
        with pytest.raises(NotFoundError, match=r"gone\.bin"):
            place.reader.read([Range(url.replace("a.bin", "gone.bin"), 0, 1)])

    @pytest.mark.parametrize("length", [len(DATA), 10, 2 * len(DATA)])
    def test_an_object_replaced_is_an_error_with_both_versions_never_a_mixture_c025(self, place: Place, length: int):
        url, etag = place.put("a.bin", b"a" * len(DATA))
        assert bytes(place.reader.read([Range(url, 0, 5, etag)])[0]) == b"aaaaa"
        _, new = place.put("a.bin", b"b" * length)
        assert new != etag
        with pytest.raises(ObjectChangedError) as error:
            place.reader.read([Range(url, 5, 10, etag)])
        assert all(text in str(error.value) for text in (url, etag, new))
        assert bytes(place.reader.read([Range(url, 5, 10, new)])[0]) == b"bbbbb"

    def test_many_threads_read_right_bytes(self, place: Place):
        url, etag = place.put("a.bin", DATA)

        def read(k: int) -> bool:
            ranges = [Range(url, s, s + 100 + k, etag) for s in range(k, 50_000, 5_000)]
            return [bytes(b) for b in place.reader.read(ranges)] == [DATA[r.start : r.stop] for r in ranges]

        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(read, range(40)))

    def test_a_pickled_copy_reads_the_same_and_counts_from_zero(self, place: Place):
        url, etag = place.put("a.bin", DATA)
        place.reader.read([Range(url, 0, 10, etag)])
        copy = pickle.loads(pickle.dumps(place.reader))
        assert bytes(copy.read([Range(url, 1, 4, etag)])[0]) == DATA[1:4]
        assert copy.counter.counts().bytes_fetched in (0, 3)
