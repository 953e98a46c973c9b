"""Several indexes, one after the other, as one index: each part is read as it would be alone."""

from __future__ import annotations

import bisect
import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bucketfeed.data.routed import PartRange, PartsReader
from bucketfeed.data.views import decoded
from bucketfeed.formats.samples import AnyChunks, AnyIndex, Bodies, Ints
from bucketfeed.sampling.mix import Mix
from bucketfeed.store.manifest import Manifest
from bucketfeed.store.ranges import Buffer, Range, RangeReader


class Starts:
    """Where each of several parts starts when they are counted through."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.starts = [0]
        for length in lengths:
            self.starts.append(self.starts[-1] + length)

    @property
    def end(self) -> int:
        """The length of all parts."""
        return self.starts[-1]

    def one(self, i: int, what: str) -> tuple[int, int]:
        """Return the part that `i` lies in, and its number there. Raises `IndexError`."""
        if not 0 <= i < self.end:
            raise IndexError(f"{what} {i} of {self.end}")
        part = bisect.bisect_right(self.starts, i) - 1
        return part, i - self.starts[part]

    def of(self, numbers: Ints) -> tuple[Ints, Ints]:
        """Return the part that each of `numbers` lies in, and its number there."""
        starts = np.array(self.starts)
        parts = np.searchsorted(starts, numbers, side="right") - 1
        return parts, numbers - starts[parts]


class Manifests(Manifest):
    """The objects of several manifests, one after the other; one that stands in two of them comes twice."""

    def __init__(self, parts: Sequence[Manifest]) -> None:
        self._parts = tuple(parts)
        self._starts = Starts([len(part) for part in parts])
        self.url = " + ".join(dict.fromkeys(part.url for part in parts))
        self.fingerprint = _digest("objects", [part.fingerprint for part in parts])
        self.version = _digest("objects", [part.version for part in parts])
        self.total_bytes = sum(part.total_bytes for part in parts)

    @property
    def sizes(self) -> NDArray[np.uint64]:  # type: ignore[override]
        """The size of each object, in a new array."""
        return np.concatenate([part.sizes for part in self._parts])

    def __len__(self) -> int:
        return self._starts.end

    def key(self, i: int) -> str:
        """Return the key of object `i`, relative to the url of its part."""
        part, i = self._starts.one(i, "object")
        return self._parts[part].key(i)

    def size(self, i: int) -> int:
        """Return the size of object `i` in bytes."""
        part, i = self._starts.one(i, "object")
        return self._parts[part].size(i)

    def find(self, url: str) -> int:
        """Return the number of the first object at `url`. Raises `KeyError` where it is none of these."""
        for part, start in zip(self._parts, self._starts.starts, strict=False):
            if url.startswith(part.url):
                try:
                    return start + part.find(url)
                except KeyError:
                    continue
        raise KeyError(url)

    def range(self, i: int, start: int = 0, stop: int | None = None) -> Range:
        """Return the range of object `i`, of the version that was listed; all of it by default."""
        part, i = self._starts.one(i, "object")
        return self._parts[part].range(i, start, stop)

    def object_url(self, i: int) -> str:
        """Return the URL of object `i`."""
        part, i = self._starts.one(i, "object")
        return self._parts[part].object_url(i)

    def etag(self, i: int) -> str:
        """Return the version of object `i` as its store names it."""
        part, i = self._starts.one(i, "object")
        return self._parts[part].etag(i)

    def __reduce__(self) -> tuple[Callable[..., Manifests], tuple[Any, ...]]:
        return type(self), (self._parts,)


class DecodedIndex:
    """`base` with `decode` called on each sample. See `AnyIndex` for what it answers."""

    def __init__(self, base: AnyIndex, decode: Callable[[Any], Any] | None) -> None:
        self.base = base
        self.decode = decode
        self.fingerprint = base.fingerprint
        self.format = base.format
        self.name = base.name
        self.locate = base.locate
        self.range = base.range
        self.ranges = base.ranges
        self.line = base.line
        self.batch = base.batch
        self.chunks = base.chunks

    @property
    def manifest(self) -> Manifest:
        """The base's."""
        return self.base.manifest

    @property
    def classes(self) -> tuple[str, ...]:
        """The base's."""
        return self.base.classes

    def __len__(self) -> int:
        return len(self.base)

    def sample(self, i: int, buffer: Buffer) -> Any:
        """Return what `decode` makes of sample `i`. Raises `DecodeError`, which names it."""
        sample = self.base.sample(i, buffer)
        return sample if self.decode is None else decoded(self.decode, sample, self.base, i)

    @property
    def batches(self) -> bool:
        """False: `decode` takes one sample."""
        return False

    def __reduce__(self) -> tuple[Callable[..., DecodedIndex], tuple[Any, ...]]:
        return type(self), (self.base, self.decode)


class PartsIndex:
    """The samples of `parts`, numbered through. See `AnyIndex` for what it answers."""

    def __init__(self, parts: Sequence[AnyIndex]) -> None:
        self.parts = tuple(parts)
        self.manifest: Manifest = Manifests([part.manifest for part in parts])
        self.fingerprint = _digest("samples", [part.fingerprint for part in parts])
        self.starts = Starts([len(part) for part in parts])

    @property
    def format(self) -> str:
        """Those of the parts."""
        return "+".join(dict.fromkeys(part.format for part in self.parts))

    @property
    def classes(self) -> tuple[str, ...]:
        """Those of the parts, where all have the same; else none."""
        [*found] = {part.classes for part in self.parts}
        return found[0] if len(found) == 1 else ()

    def __len__(self) -> int:
        return self.starts.end

    def name(self, i: int) -> str | None:
        """Return the key of the object that is sample `i`, if it is one."""
        part, i = self.starts.one(i, "sample")
        return self.parts[part].name(i)

    def locate(self, samples: Ints) -> tuple[Ints, Ints, Ints]:
        """Return shard, start and length of each of `samples`; shards are numbered through like objects."""
        shards, starts, lengths = found = tuple(np.empty(len(samples), np.int64) for _ in range(3))
        before = np.cumsum([0, *(len(part.manifest) for part in self.parts)])
        for number, places, own in self._by_part(samples):
            for column, part in zip(found, self.parts[number].locate(own), strict=True):
                column[places] = part
            shards[places] += before[number]
        return shards, starts, lengths

    def range(self, i: int) -> Range:
        """Return the range of sample `i`, which knows its part."""
        part, i = self.starts.one(i, "sample")
        return PartRange.of(part, self.parts[part].range(i))

    def ranges(self, samples: Ints) -> list[Range]:
        """Return the range of each of `samples`."""
        found: list[Any] = [None] * len(samples)
        for number, places, own in self._by_part(samples):
            for place, range in zip(places.tolist(), self.parts[number].ranges(own), strict=True):
                found[place] = PartRange.of(number, range)
        return found

    def sample(self, i: int, buffer: Buffer) -> Any:
        """Return sample `i` made from its bytes, by its part."""
        part, i = self.starts.one(i, "sample")
        return self.parts[part].sample(i, buffer)

    @property
    def batches(self) -> bool:
        """False: parts may differ."""
        return False

    def batch(self, samples: Ints, bodies: Bodies) -> Any:
        """Not to be called."""
        raise NotImplementedError

    def line(self, i: int, reader: RangeReader) -> int | None:
        """Return the line that sample `i` begins in; None without lines."""
        part, i = self.starts.one(i, "sample")
        return self.parts[part].line(i, reader.readers[part] if isinstance(reader, PartsReader) else reader)

    def chunks(self, chunk_bytes: int) -> PartsChunks:
        """Return the chunks of the parts."""
        return PartsChunks([part.chunks(chunk_bytes) for part in self.parts], [len(part) for part in self.parts])

    def _by_part(self, samples: Ints) -> list[tuple[int, Ints, Ints]]:
        """Return (part, places in `samples`, numbers in the part) for each part that some of them lie in."""
        parts, own = self.starts.of(np.asarray(samples, np.int64))
        return [
            (number, places := np.flatnonzero(parts == number), own[places]) for number in np.unique(parts).tolist()
        ]

    def __reduce__(self) -> tuple[type[PartsIndex], tuple[tuple[AnyIndex, ...]]]:
        return type(self), (self.parts,)

    def __repr__(self) -> str:
        return f"PartsIndex({', '.join(map(repr, self.parts))})"


class PartsChunks:
    """The chunks of several parts, numbered through. See `AnyChunks`.

    Where only some parts have one sample a chunk, `counts` costs these 8 bytes a sample.
    """

    def __init__(self, parts: Sequence[AnyChunks], samples: Sequence[int]) -> None:
        self.parts = tuple(parts)
        self.samples = tuple(samples)
        self._first_samples = Starts(samples)
        self._first_chunks = Starts([len(part) for part in parts])

    @functools.cached_property
    def counts(self) -> Ints | int:
        """Samples in each chunk; their number where each holds one."""
        counts = [part.counts for part in self.parts]
        if all(isinstance(count, int) for count in counts):
            return len(self)
        return np.concatenate([np.ones(n, np.int64) if isinstance(n, int) else n for n in counts])

    def __len__(self) -> int:
        return self._first_chunks.end

    def of(self, samples: Ints) -> Ints:
        """Return the chunk that each of `samples` lies in."""
        parts, own = self._first_samples.of(np.asarray(samples, np.int64))
        found = np.empty(len(own), np.int64)
        for number in np.unique(parts).tolist():
            places = np.flatnonzero(parts == number)
            found[places] = self.parts[number].of(own[places]) + self._first_chunks.starts[number]
        return found

    def range(self, c: int) -> Range:
        """Return the range of chunk `c`, which knows its part."""
        part, c = self._first_chunks.one(c, "chunk")
        return PartRange.of(part, self.parts[part].range(c))

    def size(self, c: int) -> int:
        """Return the bytes of chunk `c`."""
        part, c = self._first_chunks.one(c, "chunk")
        return self.parts[part].size(c)

    def __reduce__(self) -> tuple[Callable[..., PartsChunks], tuple[Any, ...]]:
        return type(self), (self.parts, self.samples)


class MixChunks(PartsChunks):
    """The chunks of the sources of a mix, which also says in what order they come.

    Samples beyond those of all sources are the same ones in further passes.
    """

    def __init__(self, parts: Sequence[AnyChunks], mix: Mix) -> None:
        super().__init__(parts, mix.sizes)
        self.mix = mix

    def of(self, samples: Ints) -> Ints:
        """Return the chunk that each of `samples` lies in."""
        return super().of(np.asarray(samples, np.int64) % sum(self.samples))

    def __reduce__(self) -> tuple[Callable[..., MixChunks], tuple[Any, ...]]:
        return type(self), (self.parts, self.mix)


def _digest(what: str, names: Sequence[str]) -> str:
    return hashlib.blake2b(" ".join([what, *names]).encode(), digest_size=16).hexdigest()
