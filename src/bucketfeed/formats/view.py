"""Some samples of an index, in any order, as an index of its own: nothing is copied, objects are read as before."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bucketfeed.formats.samples import AnyChunks, AnyIndex, Bodies, Ints
from bucketfeed.formats.shared import SharedArray
from bucketfeed.store.manifest import Manifest
from bucketfeed.store.ranges import Buffer, Range, RangeReader

_BLOCK = 1 << 20  # numbers worked on at a time
_SPARSE = 4  # a chunk of which a view takes less than this part is not fetched whole


class _Listed(SharedArray):
    """Whole numbers in the order given: 4 bytes each (8 beyond 2**31)."""

    def __init__(self, numbers: Ints) -> None:
        small = not numbers.size or int(numbers.max()) < 2**31
        super().__init__(numbers.astype("<i4" if small else "<i8"))

    def at(self, places: Ints) -> Ints:
        """Return the number at each of `places`."""
        return self.values[places].astype(np.int64)


@dataclass(frozen=True)
class Numbers:
    """Which samples a view takes: a range or a list of numbers, so often. A range costs nothing, however long."""

    listed: range | _Listed
    times: int = 1

    @classmethod
    def of(cls, numbers: range | Ints) -> Numbers:
        """Return them once; where they lie evenly as a range, in closed form."""
        if isinstance(numbers, range):
            return cls(numbers)
        if len(numbers) < 2:
            return cls(range(int(numbers[0]), int(numbers[0]) + 1) if len(numbers) else range(0))
        first, step = int(numbers[0]), int(numbers[1]) - int(numbers[0])
        if step and all(
            (np.diff(numbers[at : at + _BLOCK + 1]) == step).all() for at in range(0, len(numbers), _BLOCK)
        ):
            return cls(range(first, first + step * len(numbers), step))
        return cls(_Listed(numbers))

    def __len__(self) -> int:
        return len(self.listed) * self.times

    def at(self, places: Ints) -> Ints:
        """Return the number at each of `places` (0 to len - 1)."""
        places = np.asarray(places, np.int64)
        if self.times > 1:
            places = places % len(self.listed)
        if isinstance(self.listed, range):
            return self.listed.start + self.listed.step * places
        return self.listed.at(places)

    def taken(self, numbers: range | Ints) -> Numbers:
        """Return the numbers that lie at the places `numbers`."""
        if isinstance(numbers, range) and self.times == 1 and isinstance(self.listed, range):
            first = self.listed.start + self.listed.step * numbers.start
            step = self.listed.step * numbers.step
            return Numbers(range(first, first + step * len(numbers), step))
        return Numbers.of(self.at(np.asarray(numbers, np.int64)))

    def digest(self) -> str:
        """Return a hex name of these numbers in this order, however they are kept."""
        found = hashlib.blake2b(f"{len(self)} ".encode(), digest_size=16)
        if isinstance(self.listed, range):
            step = self.listed.step if len(self.listed) > 1 else 1
            found.update(f"{self.listed.start if self.listed else 0} {step} {self.times}".encode())
        else:
            found.update(f"{self.times} ".encode())
            for at in range(0, len(self.listed), _BLOCK):
                found.update(self.listed.at(np.arange(at, min(at + _BLOCK, len(self.listed)))).astype("<i8").data)
        return found.hexdigest()


class ViewIndex:
    """The samples of `base` that `numbers` takes, numbered anew from 0. See `AnyIndex` for what it answers."""

    def __init__(self, base: AnyIndex, numbers: Numbers, fingerprint: str | None = None) -> None:
        self.base = base
        self.numbers = numbers
        self.fingerprint = fingerprint or _named(base, numbers)

    @property
    def manifest(self) -> Manifest:
        """All objects of the base, those that no sample of the view lies in too."""
        return self.base.manifest

    @property
    def format(self) -> str:
        """The base's."""
        return self.base.format

    @property
    def classes(self) -> tuple[str, ...]:
        """The base's."""
        return self.base.classes

    def __len__(self) -> int:
        return len(self.numbers)

    def name(self, i: int) -> str | None:
        """Return the key of the object that is sample `i`, if it is one."""
        return self.base.name(self._one(i))

    def locate(self, samples: Ints) -> tuple[Ints, Ints, Ints]:
        """Return object, start and length of each of `samples`."""
        return self.base.locate(self.numbers.at(samples))

    def range(self, i: int) -> Range:
        """Return the range of sample `i`."""
        return self.base.range(self._one(i))

    def ranges(self, samples: Ints) -> Sequence[Range]:
        """Return the range of each of `samples`."""
        return self.base.ranges(self.numbers.at(samples))

    def sample(self, i: int, buffer: Buffer) -> Any:
        """Return sample `i` made from its bytes."""
        return self.base.sample(self._one(i), buffer)

    @property
    def batches(self) -> bool | str:
        """The base's."""
        return self.base.batches

    def batch(self, samples: Ints, bodies: Bodies) -> Any:
        """Return many samples at once, made from their bytes."""
        return self.base.batch(self.numbers.at(samples), bodies)

    def line(self, i: int, reader: RangeReader) -> int | None:
        """Return the line that sample `i` begins in; None without lines."""
        return self.base.line(self._one(i), reader)

    def chunks(self, chunk_bytes: int) -> ViewChunks:
        """Return the runs of samples that lie in one chunk of the base."""
        return ViewChunks(self, chunk_bytes)

    def _one(self, i: int) -> int:
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} of a view of {len(self)}")
        return int(self.numbers.at(np.array([i]))[0])

    def __reduce__(self) -> tuple[type[ViewIndex], tuple[AnyIndex, Numbers, str]]:
        return type(self), (self.base, self.numbers, self.fingerprint)

    def __repr__(self) -> str:
        return f"ViewIndex({self.base!r}, samples={len(self):,})"


def _named(base: AnyIndex, numbers: Numbers) -> str:
    return hashlib.blake2b(f"{base.fingerprint} {numbers.digest()}".encode(), digest_size=16).hexdigest()


class ViewChunks:
    """Consecutive samples of a view that lie in one chunk of its base, which is what is read of it.

    Of a chunk that the view takes less than a quarter of, each sample is a chunk of its own: it is read by itself.
    """

    def __init__(self, index: ViewIndex, chunk_bytes: int) -> None:
        self.index = index
        self.chunk_bytes = chunk_bytes
        self._base: AnyChunks = index.base.chunks(chunk_bytes)
        self.first: Ints | None = None
        self.counts: Ints | int = len(index)
        if not isinstance(self._base.counts, int):
            self.first = _first_of_runs(index.numbers, self._base, self._base.counts)
            self.counts = np.diff(self.first)

    def __len__(self) -> int:
        return len(self.index) if self.first is None else len(self.first) - 1

    def of(self, samples: Ints) -> Ints:
        """Return the chunk that each of `samples` lies in."""
        if self.first is None:
            return np.asarray(samples, np.int64)
        return np.searchsorted(self.first, samples, side="right") - 1

    def range(self, c: int) -> Range:
        """Return the range of the base's chunk that chunk `c` lies in: views of one data set share what they keep."""
        return self._base.range(self._in_base(c))

    def size(self, c: int) -> int:
        """Return the bytes of that range."""
        return self._base.size(self._in_base(c))

    def _in_base(self, c: int) -> int:
        if not 0 <= c < len(self):
            raise IndexError(f"chunk {c} of {len(self)}")
        first = c if self.first is None else int(self.first[c])
        return int(self._base.of(self.index.numbers.at(np.array([first])))[0])

    def __reduce__(self) -> tuple[type[ViewChunks], tuple[ViewIndex, int]]:
        return ViewChunks, (self.index, self.chunk_bytes)


def _first_of_runs(numbers: Numbers, base: AnyChunks, counts: Ints) -> Ints:
    """Return the first sample of each chunk of a view, and the number of samples."""
    firsts: list[Ints] = []
    chunks: list[Ints] = []
    before = -1
    for at in range(0, len(numbers), _BLOCK):
        found = base.of(numbers.at(np.arange(at, min(at + _BLOCK, len(numbers)))))
        new = np.flatnonzero(np.diff(found, prepend=before))
        firsts.append(new + at)
        chunks.append(found[new])
        before = int(found[-1])
    first = np.concatenate([*firsts, np.array([len(numbers)])]).astype(np.int64)
    if not chunks:
        return first
    runs = np.diff(first)
    sparse = runs * _SPARSE < counts[np.concatenate(chunks)]
    if not sparse.any():
        return first
    repeats = np.where(sparse, runs, 1)
    within = np.arange(int(repeats.sum())) - np.repeat(np.cumsum(repeats) - repeats, repeats)
    return np.append(np.repeat(first[:-1], repeats) + within, len(numbers)).astype(np.int64)
