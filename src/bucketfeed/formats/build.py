"""Where the samples of all shards are: found in parallel, kept shard by shard, the cache filled on the way."""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from tqdm.auto import tqdm

from bucketfeed.cache.disk import DiskCache
from bucketfeed.formats.journal import Journal
from bucketfeed.formats.registry import Format
from bucketfeed.formats.window import RangeWindow
from bucketfeed.store.manifest import Manifest
from bucketfeed.store.ranges import Buffer, RangeReader

Ints = NDArray[np.int64]

_THREADS = 16
_REQUESTS = 16  # in flight over all threads, at least


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
) -> tuple[Ints, Ints, Ints]:
    """Return shard, start and length of every sample, in the order of shards and bytes.

    Each shard goes into the journal as it is done, so that an interrupted run goes on where it was. Objects are read
    once, in steps of `chunk_bytes`; larger members are hopped over. Whole chunks go into `cache` as they come by,
    as long as they fit.
    """
    assert format.scan is not None
    shards = shards_of(manifest, format)
    todo = [shard for shard in shards if shard not in journal]
    filling = None if cache is None else _Filling(cache, manifest, chunk_bytes)
    bar = tqdm(
        desc=f"indexing {manifest.url}",
        total=sum(manifest.size(shard) for shard in shards),
        initial=sum(manifest.size(shard) for shard in shards if shard in journal),
        unit="B",
        unit_scale=True,
        delay=1,  # quick ones show no bar
        disable=not progress,
    )
    with bar, ThreadPoolExecutor(min(_THREADS, max(1, len(todo))), thread_name_prefix="bucketfeed-index") as pool:
        scan = _Scan(manifest, format, reader, filling, chunk_bytes, max(1, _REQUESTS // max(1, len(todo))), bar)
        running = {pool.submit(scan, shard) for shard in todo}
        try:
            for future in as_completed(running.copy()):
                running.remove(future)
                journal.add(*future.result())
        except BaseException:
            scan.stopped = True
            pool.shutdown(cancel_futures=True)
            for future in running:  # what is done is kept for the next try
                if not future.cancelled() and future.exception() is None:
                    journal.add(*future.result())
            raise
    found = [journal[shard] for shard in shards]
    counts = [len(starts) for starts, _ in found]
    return (
        np.repeat(np.array(shards, np.int64), counts),
        np.concatenate([starts for starts, _ in found]),
        np.concatenate([lengths for _, lengths in found]),
    )


class _Stopped(Exception):
    """Another shard has failed."""


@dataclass
class _Scan:
    """Finds the samples of one shard; called from many threads."""

    manifest: Manifest
    format: Format
    reader: RangeReader
    filling: _Filling | None
    chunk_bytes: int
    ahead: int  # requests of one shard at the same time
    bar: tqdm[None]
    stopped: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self, shard: int) -> tuple[int, Ints, Ints]:
        size = self.manifest.size(shard)
        seen = 0

        def read(start: int, stop: int) -> list[Buffer]:
            nonlocal seen
            if self.stopped:
                raise _Stopped
            cuts = [*range(start, stop, self.chunk_bytes), stop]
            buffers = self.reader.read([self.manifest.range(shard, *cut) for cut in itertools.pairwise(cuts)])
            self._advance(stop - seen)
            seen = stop
            return buffers

        window = RangeWindow(read, size, step=self.ahead * self.chunk_bytes, hop=self.chunk_bytes)
        starts: list[int] = []
        stops: list[int] = []
        first = 0  # sample that opened the chunk in hand
        assert self.format.scan is not None
        for start, stop in self.format.scan(window, self.manifest.object_url(shard)):
            if starts and start // self.chunk_bytes != starts[first] // self.chunk_bytes:
                self._fill(window, shard, starts[first], stops[-1])
                first = len(starts)
            starts.append(start)
            stops.append(stop)
            window.release(starts[first] if self.filling else start)
        if starts:
            self._fill(window, shard, starts[first], stops[-1])
        self._advance(size - seen)
        found = np.array(starts, np.int64)
        return shard, found, np.array(stops, np.int64) - found

    def _fill(self, window: RangeWindow, shard: int, start: int, stop: int) -> None:
        if self.filling and window.holds(start, stop):
            self.filling.put(shard, start, window.view(start, stop))

    def _advance(self, more: int) -> None:
        with self._lock:
            self.bar.update(more)


class _Filling:
    """Puts chunks into the cache until as much as it may hold has gone in, so that none drives out another."""

    def __init__(self, cache: DiskCache, manifest: Manifest, chunk_bytes: int) -> None:
        self._cache = cache
        self._manifest = manifest
        self._lock = threading.Lock()
        # Extents take whole disk blocks, and the one that fills the last room would evict the first.
        self._room = cache.stats().limit_bytes - chunk_bytes

    def put(self, shard: int, start: int, data: Buffer) -> None:
        """Cache a chunk, unless the room is spent."""
        with self._lock:
            self._room -= len(data)
            fits = self._room >= 0
        if fits and not self._cache.put(self._manifest.range(shard, start, start + len(data)), data):
            with self._lock:
                self._room = 0
