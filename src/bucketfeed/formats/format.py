"""What a format is: how the objects of a data set hold samples."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from bucketfeed.formats.window import Source, StreamWindow
from bucketfeed.store.manifest import Manifest
from bucketfeed.store.ranges import Buffer, Range, RangeReader

if TYPE_CHECKING:
    from bucketfeed.cache.disk import DiskCache
    from bucketfeed.formats.index import Index

Ints = NDArray[np.int64]

_BLOCK_SAMPLES = 256
_BLOCK_BYTES = 1 << 20


class Format:
    """How the objects of a data set hold samples. A frozen dataclass in each case: its fields are the user's options.

    Attributes:
        name: what `format=` says.
        version: goes up when the same bytes give other samples than before; an older index is then built anew.
        suffixes: endings of the names of objects that are shards; empty where every object belongs.
        indexed: whether samples must be looked up; False where every object is one sample.
    """

    name: ClassVar[str]
    version: ClassVar[int] = 1
    suffixes: ClassVar[tuple[str, ...]] = ()
    indexed: ClassVar[bool] = True

    @property
    def numbering(self) -> str:
        """The options on which it depends which samples there are; they name the index."""
        return ""

    @property
    def agreed(self) -> str:
        """What `opened` found to hold for all shards, and a scan checks: where it changes, all are scanned again."""
        return ""

    def opened(self, manifest: Manifest, reader: RangeReader) -> Self:
        """Return this format for the objects at hand, with what must be known of all of them to read one."""
        return self

    def closed(self, manifest: Manifest, reader: RangeReader, cache: DiskCache | None) -> Index | None:
        """Return the index where arithmetic gives every sample's place and nothing is scanned; None elsewhere."""
        return None

    def range(self, manifest: Manifest, shard: int, start: int, stop: int) -> Range:
        """Return the range of a sample or a chunk, given where it starts and stops in the shard."""
        return manifest.range(shard, start, stop)

    def decodes(self, manifest: Manifest) -> bool:
        """Return whether the contents of some of the objects are not their bytes."""
        return False

    def contents(self, buffers: Iterable[Buffer], url: str) -> Iterable[Buffer] | None:
        """Return what a shard holds whose bytes, front to back, are `buffers`; None where that is these bytes."""
        return None

    def scan(self, source: Source, url: str) -> Iterator[tuple[Ints, Ints]]:
        """Yield starts and stops of the samples of one shard, in order, in blocks as they are found."""
        raise NotImplementedError

    def sample(self, buffer: Buffer, manifest: Manifest, shard: int, start: int) -> dict[str, Any]:
        """Return a sample made from its bytes, given the shard's number and the sample's start in it."""
        raise NotImplementedError

    def stream(self, buffers: Iterable[Buffer], manifest: Manifest, shard: int) -> Iterator[dict[str, Any]]:
        """Yield the samples of one shard whose bytes, front to back, are `buffers`; little more than one is held."""
        url = manifest.object_url(shard)
        window = StreamWindow(self.contents(buffers, url) or buffers)
        for starts, stops in self.scan(window, url):
            for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
                yield self.sample(window.view(start, stop), manifest, shard, start)
            window.release(int(stops[-1]))

    def line(self, manifest: Manifest, shard: int, start: int, reader: RangeReader) -> int | None:
        """Return the line, from 1 on, that `start` of a shard lies in; None where a shard has no lines."""
        return None


def in_blocks(samples: Iterable[tuple[int, int]]) -> Iterator[tuple[Ints, Ints]]:
    """Yield starts and stops of `samples`, some at a time."""
    starts: list[int] = []
    stops: list[int] = []
    for start, stop in samples:
        starts.append(start)
        stops.append(stop)
        if len(starts) == _BLOCK_SAMPLES or stop - starts[0] >= _BLOCK_BYTES:
            yield np.array(starts, np.int64), np.array(stops, np.int64)
            starts, stops = [], []
    if starts:
        yield np.array(starts, np.int64), np.array(stops, np.int64)
