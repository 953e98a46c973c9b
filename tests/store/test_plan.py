from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bucketfeed.errors import ConfigError
from bucketfeed.store.plan import plan
from bucketfeed.store.ranges import Range
from bucketfeed.store.sizes import format_size, parse_size
from bucketfeed.store.urls import parse_url

ranges = st.lists(
    st.builds(
        lambda url, start, length, etag: Range(url, start, start + length, etag),
        st.sampled_from(["s3://b/x", "s3://b/y"]),
        st.integers(0, 3_000),
        st.integers(0, 400),
        st.sampled_from(["1", "2"]),
    ),
    max_size=30,
)


@given(ranges, st.integers(0, 200), st.sampled_from([0.0, 0.05, 0.5, 1.0]), st.integers(1, 2_000))
def test_each_range_is_answered_once_by_a_request_that_holds_it_within_the_bounds(asked, gap, waste, largest):
    fetches = plan(asked, max_gap_bytes=gap, max_waste=waste, max_bytes=largest)
    answered = sorted(place for fetch in fetches for place in fetch.places)
    assert answered == [place for place, r in enumerate(asked) if r.length]
    for fetch in fetches:
        parts = [asked[place] for place in fetch.places]
        assert {(p.url, p.etag) for p in parts} == {(fetch.range.url, fetch.range.etag)}
        assert (fetch.range.start, fetch.range.stop) == (min(p.start for p in parts), max(p.stop for p in parts))
        wanted = len({offset for p in parts for offset in range(p.start, p.stop)})
        assert fetch.range.length - wanted <= waste * fetch.range.length
        assert fetch.range.length <= largest or max(p.length for p in parts) + largest > fetch.range.length


def test_touching_ranges_are_one_request_and_far_ones_are_not():
    near = [Range("u", n * 100, n * 100 + 100) for n in range(50)]
    assert [fetch.range for fetch in plan(near[::-1])] == [Range("u", 0, 5_000)]
    assert len(plan([Range("u", 0, 10), Range("u", 1 << 20, (1 << 20) + 10)])) == 2


@pytest.mark.parametrize(
    ("text", "size"),
    [(0, 0), (17, 17), ("50GB", 50 * 10**9), ("50GiB", 50 * 2**30), ("1.5 MiB", 1_572_864), ("10", 10), ("2k", 2000)],
)
def test_sizes_are_read_as_people_write_them(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1", -1, "5 parsecs", None, 1.5, True])
def test_what_is_no_size_is_refused_by_name(text):
    with pytest.raises(ConfigError, match="limit_bytes"):
        parse_size(text, "limit_bytes")


def test_sizes_are_written_for_people():
    assert [format_size(n) for n in (0, 1023, 4 << 20, 123_456_789)] == ["0 B", "1023 B", "4 MiB", "117.74 MiB"]


@pytest.mark.parametrize(
    ("url", "parts"),
    [
        ("s3://b//x#?y", ("s3", "b", "/x#?y")),
        ("S3A://b/k", ("s3", "b", "k")),
        ("gcs://b/k", ("gs", "b", "k")),
        ("memory:///a/b", ("memory", "", "a/b")),
        ("file:///a/../b/", ("file", "", "/b/")),
    ],
)
def test_urls_come_apart_without_change_to_the_key(url, parts):
    assert parse_url(url) == parts
