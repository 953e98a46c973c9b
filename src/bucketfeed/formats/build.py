"""Where the samples of all shards are: found in parallel, kept shard by shard, the cache filled on the way."""

from __future__ import annotations

import itertools
import pickle
import threading
from concurrent.futures import Executor, ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from tqdm.auto import tqdm

from bucketfeed.cache.disk import DiskCache
from bucketfeed.formats.format import Format
from bucketfeed.formats.journal import Journal
from bucketfeed.formats.window import RangeWindow, StreamWindow, Window
from bucketfeed.store.manifest import Manifest
from bucketfeed.store.ranges import Buffer, Counts, Range, RangeReader

Ints = NDArray[np.int64]

_THREADS = 16
_REQUESTS = 16  # in flight over all threads, at least
_REQUESTS_ELSEWHERE = 4  # in flight for a shard, where how many are scanned at a time is another's choice


def shards_of(manifest: Manifest, format: Format) -> list[int]:
    """Return the objects that are shards: those with one of the format's endings, or all where none has."""
    named = [i for i in range(len(manifest)) if manifest.key(i).lower().endswith(format.suffixes)]
    return named or list(range(len(manifest)))


def find_samples(
    manifest: Manifest,
    format: Format,
    reader: RangeReader,
    journal: Journal,
    *,
    cache: DiskCache | None,
    chunk_bytes: int,
    progress: bool,
    executor: Executor | None = None,
) -> list[tuple[int, Ints, Ints]]:
    """Return each shard with starts and lengths of its samples, in order.

    Each shard goes into the journal as it is done, so that an interrupted run goes on where it was. Objects are read
    once, in steps of `chunk_bytes`; larger members are hopped over. Whole chunks go into `cache` as they come by,
    as long as they fit; not from an `executor`, whose tasks may run on any machine.
    """
    shards = shards_of(manifest, format)
    todo = [shard for shard in shards if shard not in journal]
    ahead = max(1, _REQUESTS // max(1, len(todo)))
    with (
        _bar(manifest, shards, journal, progress) as bar,
        ThreadPoolExecutor(min(_THREADS, max(1, len(todo))), thread_name_prefix="bucketfeed-index") as pool,
    ):
        filling = None if cache is None or executor else _Filling(cache, manifest, format, chunk_bytes)
        scan = _Scan(format, reader, filling, chunk_bytes, ahead, bar)
        call = _Elsewhere(pickle.dumps((format, reader, chunk_bytes))) if executor else scan
        running = {(executor or pool).submit(call, shard, manifest.range(shard)) for shard in todo}

        def keep(found: _Found) -> None:
            journal.add(found.shard, found.starts, found.lengths)
            if executor:
                reader.counter.add(**asdict(found.counts))
                bar.update(manifest.size(found.shard))

        try:
            for future in as_completed(running.copy()):
                running.remove(future)
                keep(future.result())
        except BaseException:
            scan.stopped = True
            for future in running:
                future.cancel()
            pool.shutdown()
            for future in running:  # what is done is kept for the next try
                if future.done() and not future.cancelled() and future.exception() is None:
                    keep(future.result())
            raise
    return [(shard, *journal[shard]) for shard in shards]


def _bar(manifest: Manifest, shards: list[int], journal: Journal, progress: bool) -> tqdm[None]:
    return tqdm(
        desc=f"indexing {manifest.url}",
        total=sum(manifest.size(shard) for shard in shards),
        initial=sum(manifest.size(shard) for shard in shards if shard in journal),
        unit="B",
        unit_scale=True,
        delay=1,  # quick ones show no bar
        disable=not progress,
    )


class _Found(NamedTuple):
    """The samples of one shard, and what another process has asked of the store to find them."""

    shard: int
    starts: Ints
    lengths: Ints
    counts: Counts = Counts()


@dataclass(frozen=True, slots=True)
class _Elsewhere:
    """A scan that any process of any machine can make, with a client and counts of its own: no manifest goes along."""

    pickled: bytes

    def __call__(self, shard: int, whole: Range) -> _Found:
        format, reader, chunk_bytes = pickle.loads(self.pickled)
        found = _Scan(format, reader, None, chunk_bytes, _REQUESTS_ELSEWHERE)(shard, whole)
        return found._replace(counts=reader.counter.counts())


class _Stopped(Exception):
    """Another shard has failed."""


@dataclass
class _Scan:
    """Finds the samples of one shard; called from many threads."""

    format: Format
    reader: RangeReader
    filling: _Filling | None
    chunk_bytes: int
    ahead: int  # requests of one shard at the same time
    bar: tqdm[None] | None = None
    stopped: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self, shard: int, whole: Range) -> _Found:
        size = whole.stop
        seen = 0

        def read(start: int, stop: int) -> list[Buffer]:
            nonlocal seen
            if self.stopped:
                raise _Stopped
            cuts = [*range(start, stop, self.chunk_bytes), stop]
            buffers = self.reader.read([whole._replace(start=a, stop=b) for a, b in itertools.pairwise(cuts)])
            self._advance(stop - seen)
            seen = stop
            return buffers

        step = self.ahead * self.chunk_bytes
        front_to_back = itertools.chain.from_iterable(read(at, min(at + step, size)) for at in range(0, size, step))
        contents = self.format.contents(front_to_back, whole.url)
        window: Window
        if contents is None:
            window = RangeWindow(read, size, step=step, hop=self.chunk_bytes)
        else:
            window = StreamWindow(contents)
        blocks = [(np.empty(0, np.int64), np.empty(0, np.int64))]
        first = last = -1  # of the chunk in hand: where its first sample starts and its last one stops
        for starts, stops in self.format.scan(window, whole.url):
            blocks.append((starts, stops))
            if self.filling:
                cells = starts // self.chunk_bytes
                opening = np.flatnonzero(cells != np.concatenate([[first // self.chunk_bytes], cells[:-1]]))
                for number in opening.tolist():
                    self._fill(window, shard, first, int(stops[number - 1]) if number else last)
                    first = int(starts[number])
            last = int(stops[-1])
            window.release(first if self.filling else last)
        self._fill(window, shard, first, last)
        self._advance(size - seen)
        found, ends = (np.concatenate(column) for column in zip(*blocks, strict=True))
        return _Found(shard, found, ends - found)

    def _fill(self, window: Window, shard: int, start: int, stop: int) -> None:
        if self.filling and start >= 0 and window.holds(start, stop):
            self.filling.put(shard, start, window.view(start, stop))

    def _advance(self, more: int) -> None:
        if self.bar is not None:
            with self._lock:
                self.bar.update(more)


class _Filling:
    """Puts chunks into the cache until as much as it may hold has gone in, so that none drives out another."""

    def __init__(self, cache: DiskCache, manifest: Manifest, format: Format, chunk_bytes: int) -> None:
        self._cache = cache
        self._manifest = manifest
        self._format = format
        self._lock = threading.Lock()
        # Extents take whole disk blocks, and the one that fills the last room would evict the first.
        self._room = cache.stats().limit_bytes - chunk_bytes

    def put(self, shard: int, start: int, data: Buffer) -> None:
        """Cache a chunk, unless the room is spent."""
        with self._lock:
            self._room -= len(data)
            fits = self._room >= 0
        if fits and not self._cache.put(self._format.range(self._manifest, shard, start, start + len(data)), data):
            with self._lock:
                self._room = 0
