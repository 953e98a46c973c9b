"""Reads ahead along a plan with threads and hands out finished batches in order, within a bound of bytes.

Three stages: the plan says what comes; fetching threads open chunks (or read single samples) in that order, as
many as `read_ahead_bytes` allows; decoding threads build whole batches, a few ahead of the loop. A chunk is held
from its first use to its last one in this epoch: in memory where its samples are small or nothing is cached, else as an
open file.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import numpy as np

from bucketfeed.cache.extent import AnyExtent, MemoryExtent
from bucketfeed.cache.reader import CachedReader, open_extent
from bucketfeed.data.allocator import keep_freed_memory
from bucketfeed.data.plan import BatchPlan
from bucketfeed.errors import BucketfeedError
from bucketfeed.formats.samples import AnyChunks, AnyIndex
from bucketfeed.store.ranges import Buffer, Range, RangeReader

_log = logging.getLogger(__name__)

# Each held chunk is an open file where there is a cache: stay far below the usual limit of 1,024 a process.
_MAX_CHUNKS = 256
_MAX_PLANNED = 512  # batches: bounds the plan itself where samples are tiny
_MAX_NEXT_EPOCH = 4  # batches read for an epoch that has not begun: it may never do so, and requests cost money
_FETCHING_BYTES = 64 << 20  # in flight at a time; 16 chunks of 4 MiB were best (docs/decisions/0002)
_FIRST_SHARE = 4
_SAY_SECONDS = 60.0  # a loop that waits this long is told what for

Assemble = Callable[[BatchPlan, "BatchBytes"], Any]


Key = tuple[int, int, int]  # epoch, chunk, stream


class _Chunk:
    """A chunk that is being read or held, and how many admitted batches still want it."""

    __slots__ = ("extent", "final", "key", "range", "small", "users", "waiting")

    def __init__(self, key: Key, range: Range, small: bool) -> None:
        self.key = key
        self.range = range
        self.small = small
        self.extent: AnyExtent | None = None
        self.waiting: list[_Job] = []
        self.users = 0
        self.final = False  # no batch after those admitted wants it


class _Job:
    """A planned batch on its way. Its samples lie in chunks, by their places in it, or are read by themselves.

    Hundreds wait at a time: starts and lengths are kept as plain numbers, which the garbage collector passes over.
    """

    __slots__ = (
        "alone",
        "chunks",
        "exact",
        "exact_bytes",
        "future",
        "lengths",
        "missing",
        "places",
        "plan",
        "started",
        "starts",
        "within",
    )

    def __init__(
        self,
        plan: BatchPlan,
        starts: list[int],
        lengths: list[int],
        places: dict[Key, list[int]],
        alone: list[int],
        within: list[Range] | None = None,
    ) -> None:
        self.plan = plan
        self.starts = starts
        self.lengths = lengths
        self.places = places
        self.alone = alone
        self.within = within
        self.exact_bytes = sum(lengths[place] for place in alone)
        self.exact: list[Buffer] = []
        self.chunks: dict[Key, _Chunk] = {}
        self.missing = 0
        self.started = False
        self.future: Future[Any] = Future()


class BatchBytes:
    """The bytes of a batch's samples, for the thread that builds it; good until it is built."""

    __slots__ = ("_job",)

    def __init__(self, job: _Job) -> None:
        self._job = job

    @property
    def length(self) -> int:
        """How many bytes there are."""
        return sum(self._job.lengths)

    def each(self) -> list[Buffer]:
        """Return the bytes of each sample."""
        job = self._job
        buffers: list[Buffer] = [b""] * len(job.starts)
        for place, body in zip(job.alone, job.exact, strict=True):
            buffers[place] = body
        for extent, places in self._extents():
            spans = [(job.starts[place], job.starts[place] + job.lengths[place]) for place in places]
            for place, body in zip(places, extent.read_all(spans), strict=True):
                buffers[place] = body
        return buffers

    def joined(self) -> memoryview:
        """Return the bytes of all samples, one behind the other, in writable memory of their own."""
        job = self._job
        stops = list(itertools.accumulate(job.lengths, initial=0))
        joined = np.empty(stops[-1], np.uint8).data
        for place, body in zip(job.alone, job.exact, strict=True):
            joined[stops[place] : stops[place + 1]] = body
        for extent, places in self._extents():
            extent.read_into([(job.starts[place], joined[stops[place] : stops[place + 1]]) for place in places])
        return joined

    def _extents(self) -> Iterator[tuple[AnyExtent, list[int]]]:
        for key, places in self._job.places.items():
            extent = self._job.chunks[key].extent
            assert extent is not None
            yield extent, places


class Pipeline:
    """An iterator of (plan, batch). Use from one thread; `close` (or dropping it) ends the reading ahead.

    Chunks whose samples have at most `small_bytes` on average are held in memory, the others as open files.
    """

    def __init__(
        self,
        plans: Iterator[BatchPlan],
        index: AnyIndex,
        chunks: AnyChunks,
        reader: RangeReader,
        assemble: Assemble,
        *,
        read_ahead_bytes: int,
        num_threads: int,
        small_bytes: int = 0,
    ) -> None:
        keep_freed_memory()
        self._plans = plans
        self._index = index
        self._chunks = chunks
        self._reader = reader
        self._assemble = assemble
        self._budget = read_ahead_bytes
        self._batches_ahead = num_threads + 2
        self._small_bytes = small_bytes
        self._single = isinstance(chunks.counts, int)
        self._counts = np.asarray(chunks.counts)
        self._size = functools.lru_cache(_MAX_PLANNED)(chunks.size)
        self._first = True
        mean = max(1, index.manifest.total_bytes // max(1, len(chunks)))
        fetchers = 8 if self._single else min(64, max(8, _FETCHING_BYTES // mean))
        self._fetchers = ThreadPoolExecutor(fetchers, thread_name_prefix="bucketfeed-fetch")
        self._decoders = ThreadPoolExecutor(num_threads, thread_name_prefix="bucketfeed-decode")
        # Reentrant: a future that is done already runs its callback in the thread that adds it.
        self._lock = threading.RLock()
        self._jobs: deque[_Job] = deque()
        self._next: _Job | None = None
        self._held: dict[Key, _Chunk] = {}
        self._ends: list[tuple[int, int, Key]] = []  # a heap of (epoch, last position, chunk)
        self._held_bytes = 0
        self._closed = False

    def __iter__(self) -> Pipeline:
        return self

    def __next__(self) -> tuple[BatchPlan, Any]:
        """Return the next batch of the plan, or raise what its reading or decoding raised."""
        with self._lock:
            self._pump()
            if not self._jobs or self._closed:
                raise StopIteration
            job = self._jobs[0]
        while not wait([job.future], timeout=_SAY_SECONDS).done:
            _log.warning("still waiting for batch %d of epoch %d: %s", job.plan.number, job.plan.epoch, _why(job))
        with self._lock:
            self._jobs.popleft()
            self._pump()
        return job.plan, job.future.result()

    @property
    def waiting(self) -> bool:
        """Whether the next batch is not finished yet."""
        with self._lock:
            return not self._jobs or not self._jobs[0].future.done()

    def close(self) -> None:
        """Stop reading ahead; requests under way end by themselves and their bytes are dropped."""
        with self._lock:
            self._closed = True
            idle = [chunk for chunk in self._held.values() if not chunk.users]
            for chunk in idle:
                self._release(chunk)
            for job in self._jobs:  # a loop in another thread, or beneath a signal handler, may wait for one
                if not job.future.done():
                    job.started = True
                    job.future.set_exception(BucketfeedError("the Loader was closed while this batch was awaited"))
        self._fetchers.shutdown(wait=False, cancel_futures=True)
        self._decoders.shutdown(wait=False, cancel_futures=True)

    def __del__(self) -> None:
        if not self._closed:
            self.close()

    # -- planning: all of this runs under the lock

    def _pump(self) -> None:
        """Admit planned batches while there is room, and start building those that are next and have arrived."""
        while not self._closed and len(self._jobs) < _MAX_PLANNED and not self._held_back():
            if self._next is None:
                plan = next(self._plans, None)
                if plan is None:
                    break
                self._next = self._job(plan)
            job = self._next
            new = [key for key in job.places if key not in self._held]
            cost = job.exact_bytes + sum(self._size(key[1]) for key in new)
            full = self._held_bytes + cost > self._budget or len(self._held) + len(new) > _MAX_CHUNKS
            # The batch that the loop waits for is always admitted: a bound too small slows, it never stops.
            if full and self._jobs:
                break
            self._next = None
            self._admit(job, cost)
        for number, job in enumerate(self._jobs):
            if number >= self._batches_ahead:
                break
            if not job.missing and not job.started and not self._closed:
                job.started = True
                self._decoders.submit(self._build, job)

    def _held_back(self) -> bool:
        """Whether more would come too early: before the very first batch, or deep in an epoch that has not begun."""
        jobs = self._jobs
        if jobs and jobs[0].within and jobs[0].missing:
            return True
        return len(jobs) > _MAX_NEXT_EPOCH and jobs[-_MAX_NEXT_EPOCH].plan.epoch > jobs[0].plan.epoch

    def _job(self, plan: BatchPlan) -> _Job:
        _, starts, lengths = (column.tolist() for column in self._index.locate(plan.samples))
        every = list(range(len(starts)))
        if self._single:
            return _Job(plan, starts, lengths, {}, every)
        first, self._first = self._first, False
        if first:
            within = [self._chunks.range(chunk) for chunk in plan.chunks.tolist()]
            # The loop waits for this batch: where the chunks of all its streams are many times its own bytes, those.
            if sum(lengths) * _FIRST_SHARE <= sum(r.length for r in set(within)):
                return _Job(plan, starts, lengths, {}, every, within)
        places: dict[Key, list[int]] = {}
        for place, chunk, stream in zip(every, plan.chunks.tolist(), plan.streams.tolist(), strict=True):
            places.setdefault((plan.epoch, chunk, stream), []).append(place)
        # A chunk of one sample is read by itself: nothing would share its being held.
        alone = [key for key in places if self._counts[key[1]] == 1]
        return _Job(plan, starts, lengths, places, sorted(place for key in alone for place in places.pop(key)))

    def _admit(self, job: _Job, cost: int) -> None:
        self._jobs.append(job)
        self._held_bytes += cost
        for key, places in job.places.items():
            chunk = self._held.get(key)
            if chunk is None:
                range = self._chunks.range(key[1])
                small = range.length <= self._small_bytes * int(self._counts[key[1]])
                chunk = self._held[key] = _Chunk(key, range, small)
                heapq.heappush(self._ends, (key[0], int(job.plan.last[places[0]]), key))
                self._fetchers.submit(self._open, chunk)
            job.chunks[key] = chunk
            chunk.users += 1
            if chunk.extent is None:
                chunk.waiting.append(job)
                job.missing += 1
        if job.alone:
            job.missing += 1
            self._fetchers.submit(self._read_exact, job)
        while self._ends and self._ends[0][:2] <= (job.plan.epoch, job.plan.end):
            _, _, key = heapq.heappop(self._ends)
            if (done := self._held.get(key)) is not None:
                done.final = True
                self._release_if_done(done)

    def _release_if_done(self, chunk: _Chunk) -> None:
        if not chunk.users and (chunk.final or self._closed):
            self._release(chunk)

    def _release(self, chunk: _Chunk) -> None:
        if self._held.get(chunk.key) is chunk:
            del self._held[chunk.key]
            self._held_bytes -= chunk.range.length
        if chunk.extent is not None:
            chunk.extent.close()

    def _let_go(self, job: _Job) -> None:
        """Drop all that `job` holds: it is built, or has failed."""
        self._held_bytes -= job.exact_bytes
        job.exact_bytes, job.exact = 0, []
        for chunk in job.chunks.values():
            chunk.users -= 1
            self._release_if_done(chunk)
        job.chunks = {}

    # -- fetching: in the fetchers' threads

    def _open(self, chunk: _Chunk) -> None:
        try:
            extent = open_extent(self._reader, chunk.range)
            if chunk.small and not isinstance(extent, MemoryExtent):
                with extent:
                    extent = MemoryExtent(chunk.range, extent.read(*chunk.range[1:3]))
            chunk.extent, error = extent, None
        except BaseException as e:
            error = e
        with self._lock:
            waiting, chunk.waiting = chunk.waiting, []
            if error is not None:
                self._release(chunk)  # a later batch that wants it tries again
            for job in waiting:
                self._arrived(job, error)
            if self._closed:
                self._release_if_done(chunk)
            self._pump()

    def _read_exact(self, job: _Job) -> None:
        try:
            ranges = self._index.ranges(job.plan.samples[job.alone])
            if job.within and isinstance(self._reader, CachedReader):
                job.exact = self._reader.peek(ranges, job.within)
            else:
                job.exact = self._reader.read(ranges)
            error = None
        except BaseException as e:
            error = e
        with self._lock:
            self._arrived(job, error)
            self._pump()

    def _arrived(self, job: _Job, error: BaseException | None) -> None:
        job.missing -= 1
        if error is not None and not job.future.done():
            job.started = True
            self._let_go(job)
            job.future.set_exception(error)

    # -- decoding: in the decoders' threads

    def _build(self, job: _Job) -> None:
        result: Any = None
        error: BaseException | None = None
        try:
            result = self._assemble(job.plan, BatchBytes(job))
        except StopIteration as e:  # it would end the loop's own generator without a word
            error = RuntimeError(f"collate raised StopIteration in batch {job.plan.number} of epoch {job.plan.epoch}")
            error.__cause__ = e
        except BaseException as e:
            error = e
        with self._lock:
            self._let_go(job)
            self._pump()
            # Last, so that the loop finds room made and the next batch begun.
            if job.future.done():  # closed meanwhile
                return
            if error is None:
                job.future.set_result(result)
            else:
                job.future.set_exception(error)


def _why(job: _Job) -> str:
    waiting = [str(chunk.range) for chunk in list(job.chunks.values()) if chunk.extent is None]
    if waiting:
        return f"reading {', '.join(waiting[:3])}" + (f" and {len(waiting) - 3} more" if len(waiting) > 3 else "")
    return "decoding" if not job.missing else "reading its samples"
