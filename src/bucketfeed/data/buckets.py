"""Batches of samples of about one length, in an order that is as fixed as that of single samples.

The order of an epoch is cut into windows of consecutive positions; a window's positions are sorted by length and cut
into batches, and these are shuffled among themselves. So samples stay near their chunks, memory is that of a window,
and a batch's number says all of where a run stands.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bucketfeed.data.views import Unfixed
from bucketfeed.errors import ConfigError
from bucketfeed.formats.samples import AnyIndex
from bucketfeed.formats.view import Numbers
from bucketfeed.sampling import bijection
from bucketfeed.sampling.division import Division, Tail
from bucketfeed.sampling.mix import AnyOrder
from bucketfeed.sampling.topology import Topology
from bucketfeed.store.whole import whole

if TYPE_CHECKING:
    from bucketfeed.data.dataset import MapDataset

Ints = NDArray[np.int64]

_BATCHES = 100  # in a window: leaves little to pad, and enough batches to shuffle
_WINDOW_BYTES = 64 << 20  # where samples share chunks, those of a window are held until it ends
_PROBED = 1024
_BLOCK = 1 << 16


@dataclass(frozen=True, eq=False)
class LengthBuckets:
    """Makes a `Loader` put samples of about one length in a batch; pass it as `batches=`.

    The batches of an epoch, and their order, depend on seed, epoch, data and the arguments here: rank r of w takes
    batches r, r + w, ... of the same row on any number of ranks, each rank as many (see `tail`). A state counts batches
    and goes on from there.

    Args:
        lengths: a whole number for each sample of the data set, shape (n,); None takes its bytes. Of a mix: one
            for each sample of its sources, in their order.
        batch_size: samples in a batch; with `max_tokens`, at most.
        max_tokens: bound on samples times the longest of them, so that long samples come in small batches. The batches
            of an epoch are counted beforehand, which takes a few seconds for each million samples.
        window: consecutive samples of the order among which lengths are sorted. By default 100 batches, or as many
            as lie in 64 MiB where several samples share a chunk: chunks are held in memory, or open in the cache,
            as long as their window lasts.

    >>> bf.Loader(ds, batches=bf.LengthBuckets(lengths, max_tokens=16_384), shuffle=True, collate=bf.collate.pad())
    """

    lengths: ArrayLike | None = field(default=None, repr=False)
    batch_size: int | None = None
    max_tokens: int | None = None
    window: int | None = None
    _numbers: Numbers | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.batch_size is None and self.max_tokens is None:
            raise ConfigError("LengthBuckets needs batch_size, max_tokens, or both")
        for name in ("batch_size", "max_tokens", "window"):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, whole(name, value, 1))
        numbers = None
        if self.lengths is not None:
            lengths = np.asarray(self.lengths)
            if lengths.ndim != 1 or lengths.dtype.kind not in "iu" or (lengths.size and lengths.min() < 0):
                raise ConfigError(
                    "lengths must be one whole number of at least 0 for each sample, shape (n,), not "
                    f"{lengths.dtype} of shape {lengths.shape}"
                )
            numbers = Numbers.of(lengths.astype(np.int64, copy=False))
        object.__setattr__(self, "lengths", None)
        object.__setattr__(self, "_numbers", numbers)

    def over(self, dataset: MapDataset, chunk_bytes: int) -> Buckets:
        """Return them for the samples of `dataset`. Raises `ConfigError` where they do not fit it."""
        index = dataset.index.base if isinstance(dataset.index, Unfixed) else dataset.index
        n = len(index)
        lengths = Numbers.of(_sizes(index, np.arange(n))) if self._numbers is None else self._numbers
        if len(lengths) != n:
            raise ConfigError(f"LengthBuckets has {len(lengths)} lengths, but {index.manifest.url} has {n} samples")
        mean = self._check(lengths)
        size = self.batch_size or max(1, int((self.max_tokens or 0) // mean))
        window = self.window
        if window is None:
            window = _BATCHES * size
            if n and not isinstance(dataset.chunks(chunk_bytes).counts, int):
                probed = np.unique(np.linspace(0, n - 1, min(n, _PROBED)).astype(np.int64))
                window = min(window, int(_WINDOW_BYTES // max(1.0, float(_sizes(index, probed).mean()))))
        window = max(1, window // size) * size  # so that only the last one ends with a batch that is not full
        sizes = f"batch_size={self.batch_size}, max_tokens={self.max_tokens}, window={window}"
        name = f"LengthBuckets({sizes}, lengths={lengths.digest()[:16]})"
        if isinstance(dataset.index, Unfixed):
            lengths = replace(lengths, times=dataset.index.numbers.times)
        return Buckets(name, lengths, self.batch_size, self.max_tokens, window, size)

    def _check(self, lengths: Numbers) -> float:
        """Return the mean length, at least 1."""
        total = 0
        for at in range(0, len(lengths), _BLOCK):
            some = lengths.at(np.arange(at, min(at + _BLOCK, len(lengths))))
            total += int(some.sum())
            if self.max_tokens is not None and some.max() > self.max_tokens:
                raise ConfigError(
                    f"sample {at + int(some.argmax())} has length {some.max()}, more than "
                    f"max_tokens={self.max_tokens}: leave such samples out by ds.select, or, where collate cuts them, "
                    "pass numpy.minimum(lengths, max_tokens)"
                )
        return max(1.0, total / max(1, len(lengths)))


def _sizes(index: AnyIndex, samples: Ints) -> Ints:
    """Return the bytes of each of `samples`."""
    sizes = np.empty(len(samples), np.int64)
    for at in range(0, len(samples), _BLOCK):
        sizes[at : at + _BLOCK] = index.locate(samples[at : at + _BLOCK])[2]
    return sizes


@dataclass(frozen=True, eq=False)
class Buckets:
    """`LengthBuckets` of one data set: all is settled.

    `name` tells what a saved state must agree with, `size` how many samples a batch has on average.
    """

    name: str
    lengths: Numbers
    batch_size: int | None
    max_tokens: int | None
    window: int
    size: int

    def batches(self, order: AnyOrder, tail: Tail) -> EpochBatches:
        """Return the batches of one epoch. "drop" leaves out what fills no batch of `batch_size`."""
        used = len(order)
        if tail == "drop" and self.max_tokens is None:
            used -= used % self.size
        return EpochBatches(self, order, used)


class EpochBatches:
    """The batches of one epoch over all ranks, by number: each the positions of its samples in the order."""

    def __init__(self, buckets: Buckets, order: AnyOrder, used: int) -> None:
        self.buckets = buckets
        self.order = order
        self.used = used
        windows = range(-(-used // buckets.window))
        if buckets.max_tokens is None:
            counts = [-(-len(self._positions(window)) // buckets.size) for window in windows]
        else:
            counts = [len(self._made(window)) for window in windows]
        self._first = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])  # batch of each window, and the number
        self._last: tuple[int, Sequence[Ints]] = (-1, ())

    def __len__(self) -> int:
        return int(self._first[-1])

    def __getitem__(self, number: int) -> Ints:
        window = self._window(number)
        made = self._last
        if made[0] != window:
            made = self._last = (window, self._made(window))
        return made[1][number - int(self._first[window])]

    def begin(self, number: int) -> int:
        """Return the first position of the window that batch `number` is of."""
        return self._window(number) * self.buckets.window

    def _window(self, number: int) -> int:
        return int(np.searchsorted(self._first, number, side="right")) - 1

    def _positions(self, window: int) -> range:
        first = window * self.buckets.window
        return range(first, min(first + self.buckets.window, self.used))

    def _made(self, window: int) -> Sequence[Ints]:
        """Return the batches of one window, in their order."""
        positions = np.array(self._positions(window), np.int64)
        lengths = self.buckets.lengths.at(self.order.samples(positions))
        sort = np.argsort(lengths, kind="stable")
        batches = np.split(positions[sort], self._cuts(lengths[sort]))
        if not self.order.shuffle:
            return batches
        key = bijection.key(self.order.seed, self.order.epoch, 2, window)
        places = bijection.permuted(np.arange(len(batches)), np.array([len(batches)]), key)
        return [batches[place] for place in places.tolist()]

    def _cuts(self, lengths: Ints) -> list[int]:
        """Return where lengths that ascend are cut into batches."""
        size, most = self.buckets.batch_size or len(lengths), self.buckets.max_tokens
        if most is None:
            return list(range(size, len(lengths), size))
        cuts, start = [], 0
        for place, length in enumerate(lengths.tolist()):
            if place - start == size or (place - start + 1) * length > most:
                cuts.append(place)
                start = place
        return cuts


class BucketDivision:
    """One rank's batches of an epoch from batch `start` on: what `Division` is where batches are cut by count alone."""

    def __init__(self, batches: EpochBatches, topology: Topology, tail: Tail, start: int) -> None:
        if tail == "drop" and len(batches) < topology.world_size:
            raise ConfigError(
                f"LengthBuckets makes {len(batches)} batches of {len(batches.order)} samples, fewer than the "
                f"{topology.world_size} ranks: make them smaller, or pass tail='pad' or tail='uneven'"
            )
        self._batches = batches
        self._steps = Division(len(batches), 1, topology, tail, start=min(start, len(batches)))

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def is_over(self) -> bool:
        """Whether no rank has anything left."""
        return self._steps.is_over

    def positions(self, batch: int) -> Ints:
        """Return the positions of this rank's batch."""
        return self._batches[int(self._steps.positions(batch)[0])]

    def consumed(self, batch: int) -> int:
        """Return how many batches of the epoch are done once every rank has taken this one."""
        return self._steps.consumed(batch)

    def passed(self, batch: int, positions: Ints) -> int:
        """Return the position up to which this and later batches of the epoch want nothing more after this one."""
        if self._steps.padded(batch):
            return len(self._batches.order) - 1
        return self._batches.begin(int(self._steps.positions(batch)[0])) - 1
