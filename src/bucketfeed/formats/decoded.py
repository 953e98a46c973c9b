"""Reads what compressed objects hold: each is decompressed once a node, into the cache, chunk by chunk."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from bucketfeed.cache.disk import DiskCache
from bucketfeed.cache.extent import AnyExtent, MemoryExtent
from bucketfeed.cache.reader import CachedReader
from bucketfeed.errors import FormatError
from bucketfeed.formats.window import StreamWindow
from bucketfeed.store.ahead import read_through
from bucketfeed.store.ranges import Buffer, Range, RangeReader

if TYPE_CHECKING:
    from bucketfeed.formats.index import Chunks

_LOCKS = 256  # files that processes of the node meet at, each for many shards
_STEP_BYTES = 4 << 20


class DecodedReader(CachedReader):
    """A `CachedReader` of ranges that count decompressed bytes, as the index of `chunks` gives them.

    What is missing in the cache is made by one process of the node, which decompresses the whole shard and puts all of
    its chunks into the cache, while others that want some of them wait.
    """

    def __init__(self, inner: RangeReader, cache: DiskCache, chunks: Chunks) -> None:
        super().__init__(inner, cache)
        self._chunks = chunks

    def peek(self, ranges: Sequence[Range], within: Sequence[Range]) -> list[Buffer]:
        """Return the bytes of each range as `read` does: nothing less than a shard can be fetched."""
        return self.read(ranges, within)

    def _fetched(self, ranges: list[Range]) -> list[AnyExtent]:
        extents: list[AnyExtent] = []
        with contextlib.ExitStack() as stack:
            for range in ranges:
                extent = self._extent(range)
                stack.callback(extent.close)
                extents.append(extent)
            stack.pop_all()
        return extents

    def _extent(self, range: Range) -> AnyExtent:
        index = self._chunks.index
        if index.contents((), range.url) is None:
            return super()._fetched([range])[0]
        pieces = self._pieces(range)
        extents = self._kept(pieces)
        if extents is None:
            with alone(self.cache, range.url):
                extents = self._kept(pieces)  # another process may have been at it
                self.counter.add(cache_hits=int(extents is not None), cache_misses=int(extents is None))
                extents = extents or self._decoded(pieces)
        if len(extents) == 1:
            return extents[0]
        body = bytearray(range.length)  # what lies between chunks belongs to no sample
        for extent in extents:
            with extent:
                start, stop = max(range.start, extent.range.start), min(range.stop, extent.range.stop)
                body[start - range.start : stop - range.start] = extent.read(start, stop)
        return MemoryExtent(range, bytes(body))

    def _pieces(self, range: Range) -> list[Range]:
        """Return the chunks that `range` lies in."""
        index = self._chunks.index
        sample = index.find(index.manifest.find(range.url), range.start)
        chunk = int(self._chunks.of(np.array([sample]))[0])
        pieces = [self._chunks.range(chunk)]
        while pieces[-1].stop < range.stop:
            chunk += 1
            pieces.append(self._chunks.range(chunk))
        return pieces

    def _kept(self, pieces: list[Range]) -> list[AnyExtent] | None:
        """Return the extents of `pieces` where all are in the cache."""
        with contextlib.ExitStack() as stack:
            extents: list[AnyExtent] = []
            for piece in pieces:
                extent = self.cache.get(piece)
                if extent is None:
                    return None
                extents.append(stack.enter_context(extent))
            stack.pop_all()
        return extents

    def _decoded(self, wanted: list[Range]) -> list[AnyExtent]:
        """Decompress the shard that `wanted` are chunks of, put all of its chunks into the cache, and return these."""
        manifest, url = self._chunks.index.manifest, wanted[0].url
        shard = manifest.find(url)
        buffers = read_through(self.inner, manifest.range(shard), _STEP_BYTES)
        window = StreamWindow(self._chunks.index.contents(buffers, url) or ())
        held: dict[Range, Buffer] = {}
        for chunk in self._chunks.of_shard(shard):
            piece = self._chunks.range(chunk)
            data = window.view(piece.start, piece.stop)
            if len(data) < piece.length:
                raise FormatError(f"{url} holds fewer bytes than when it was indexed; open the data set again")
            self.cache.put(piece, data)
            if piece in wanted:
                held[piece] = data
            window.release(piece.stop)
        return [self.cache.get(piece) or MemoryExtent(piece, held[piece]) for piece in wanted]

    def __reduce__(self) -> tuple[Callable[..., DecodedReader], tuple[Any, ...]]:
        return type(self), (self.inner, self.cache, self._chunks)


def lock_path(cache: DiskCache, name: str) -> Path:
    """Return the file whose lock whoever decodes `name` into `cache` must have."""
    number = xxhash.xxh3_64_intdigest(name.encode("utf-8", "surrogateescape")) % _LOCKS
    return cache.index_folder / f"{number:03}.lock"


@contextlib.contextmanager
def alone(cache: DiskCache, url: str) -> Iterator[None]:
    """For the `with` block, no other thread or process of the node decodes the shard at `url` into `cache`."""
    with open(lock_path(cache, url), "ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # which closing would not do where a fork has happened meanwhile
