"""Any sequence of uses: what is returned is right or nothing, what is held stays, and the limit holds."""

from __future__ import annotations

import logging
import os
import pickle
import shutil
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from objects import an_extent, body, cache_files, disk_usage, read_all, temporary_files

from bucketfeed.cache.disk import DiskCache
from bucketfeed.cache.extent import AnyExtent
from bucketfeed.store.ranges import Range

EXTENTS = [
    an_extent(number, length) for number, length in enumerate([0, 1, 4072, 4073, 30_000, 60_000, 90_000, 400_000])
]
EXTENTS += [extent._replace(etag="v2") for extent in EXTENTS]

extents = st.sampled_from(EXTENTS)


class CacheMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        logging.getLogger("bucketfeed.cache").setLevel(logging.ERROR)  # that it is full is no news here
        self.folder = Path(tempfile.mkdtemp())
        self.limit = 300_000
        self.caches = [DiskCache(self.folder, self.limit), DiskCache(self.folder, self.limit)]
        self.held: list[AnyExtent] = []

    caches_of = st.integers(0, 1)

    @rule(which=caches_of, extent=extents)
    def put(self, which: int, extent: Range) -> None:
        if self.caches[which].put(extent, body(extent)):
            assert read_all(self.caches[1 - which], extent) == body(extent)

    @rule(which=caches_of, extent=extents)
    def get(self, which: int, extent: Range) -> None:
        assert read_all(self.caches[which], extent) in (None, body(extent))

    @rule(which=caches_of, extent=extents)
    def fetch_and_hold(self, which: int, extent: Range) -> None:
        self.held.append(self.caches[which].get_or_fetch(extent, lambda: body(extent)))

    @rule(which=caches_of, several=st.lists(extents, max_size=6))
    def fetch_several(self, which: int, several: list[Range]) -> None:
        fetched: list[Range] = []

        def fetch(ranges: list[Range]) -> list[bytes]:
            fetched.extend(ranges)
            return [body(range) for range in ranges]

        extents = self.caches[which].fetch(several, fetch)
        for extent, asked in zip(extents, several, strict=True):
            assert extent.read(asked.start, asked.stop) == body(asked)
        self.held.extend(dict(zip(several, extents, strict=True)).values())
        assert len(set(fetched)) == len(fetched)

    @precondition(lambda self: self.held)
    @rule(place=st.integers(0, 100))
    def let_go(self, place: int) -> None:
        self.held.pop(place % len(self.held)).close()

    @precondition(lambda self: not self.held)
    @rule(place=st.integers(0, 100), length=st.floats(0, 0.999), which=caches_of)
    def cut_a_file(self, place: int, length: float, which: int) -> None:
        if files := cache_files(self.caches[0]):
            path = files[place % len(files)]
            os.truncate(path, int(path.stat().st_size * length))

    @precondition(lambda self: not self.held)
    @rule(place=st.integers(0, 100), at=st.floats(0, 0.999), which=caches_of)
    def flip_a_bit(self, place: int, at: float, which: int) -> None:
        if files := cache_files(self.caches[0]):
            data = bytearray((path := files[place % len(files)]).read_bytes())
            if data:
                data[int(len(data) * at)] ^= 4
                path.write_bytes(data)
            # Only who has not used the file yet looks at its checksum.
            self.caches = [DiskCache(self.folder, self.limit) for _ in self.caches]

    @rule(which=caches_of)
    def replace_by_a_copy(self, which: int) -> None:
        self.caches[which] = pickle.loads(pickle.dumps(self.caches[which]))

    @rule(which=caches_of)
    def clear(self, which: int) -> None:
        self.caches[which].clear()
        assert cache_files(self.caches[which]) == []

    @rule(which=caches_of)
    def verify(self, which: int) -> None:
        self.caches[which].verify()
        assert self.caches[which].verify() == 0

    @rule(text=st.sampled_from([b"", b"x", b"0" * 31]))
    def lose_the_ledger(self, text: bytes) -> None:
        (self.folder / "ledger").write_bytes(text)

    @invariant()
    def the_limit_holds(self) -> None:
        assert disk_usage(self.folder) <= self.limit
        assert temporary_files(self.caches[0]) == []

    @invariant()
    def what_is_held_can_be_read(self) -> None:
        for extent in self.held:
            assert extent.read(extent.range.start, extent.range.stop) == body(extent.range)

    def teardown(self) -> None:
        for extent in self.held:
            extent.close()
        shutil.rmtree(self.folder)
        logging.getLogger("bucketfeed.cache").setLevel(logging.NOTSET)


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(
    max_examples=40, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
