"""The order of an epoch, as arithmetic: position to sample, with no array of n entries.

Chunks are permuted; `streams` readers each take a run of that permutation, and positions go round among them; inside
each chunk samples are permuted too. It depends on the chunks, the seed, the epoch and the number of streams, and on
nothing else: not on ranks, workers, threads or batch size.
"""

from __future__ import annotations

import numpy as np
import xxhash
from numpy.typing import NDArray

from bucketfeed.errors import ConfigError
from bucketfeed.sampling import bijection

Ints = NDArray[np.int64]

_HASHED_POSITIONS = 65_536


class Order:
    """The bijection from positions 0 .. n-1 of one epoch to samples 0 .. n-1.

    Args:
        counts: samples in each chunk, shape (k,); or n, for n chunks of one sample each.
        seed: names the family of orders, one for each epoch.
        epoch: counts from 0.
        streams: how many chunks are interleaved.
        shuffle: False gives the data set's own order.

    >>> Order(10, seed=1).samples(np.arange(10)).tolist()
    [3, 6, 7, 4, 0, 2, 8, 1, 5, 9]
    """

    def __init__(
        self, counts: NDArray[np.int64] | int, *, seed: int = 0, epoch: int = 0, streams: int = 16, shuffle: bool = True
    ) -> None:
        for name, value, least in (("seed", seed, 0), ("epoch", epoch, 0), ("streams", streams, 1)):
            if value < least:
                raise ConfigError(f"{name} must be at least {least}, not {value}")
        self.seed = seed
        self.epoch = epoch
        self.shuffle = shuffle
        self.streams = streams if shuffle else 1
        self._inner_key = bijection.key(seed, epoch, 1)
        chunk_key = bijection.key(seed, epoch, 0)
        if isinstance(counts, int):
            self._n = self._k = counts
            self._counts = None
            self._chunk_key = chunk_key
        else:
            self._counts = np.asarray(counts, np.int64)
            if self._counts.size and self._counts.min() < 1:
                raise ConfigError(f"every chunk must have a sample, found one of {self._counts.min()}")
            self._k = len(self._counts)
            chunks = np.arange(self._k)
            self._permuted_chunks = (
                bijection.permuted(chunks, np.array([self._k]), chunk_key) if shuffle and self._k else chunks
            )
            # Where each chunk starts, in the data set and in the permuted row of chunks.
            self._first = np.concatenate([[0], np.cumsum(self._counts)])
            self._cum = np.concatenate([[0], np.cumsum(self._counts[self._permuted_chunks])])
            self._n = int(self._first[-1])
        self._run = self._n // self.streams  # samples that each stream reads

    def __len__(self) -> int:
        return self._n

    def samples(self, positions: Ints) -> Ints:
        """Return the sample at each position, shape as given; positions lie in [0, n)."""
        q, _ = self._row(positions)
        if self._counts is None:
            return self._chunk(q)
        place = np.searchsorted(self._cum, q, side="right") - 1
        chunk = self._permuted_chunks[place]
        offset = q - self._cum[place]
        if self.shuffle:
            keys = bijection.mixed(self._inner_key ^ chunk.astype(np.uint64))
            offset = bijection.permuted(offset, self._counts[chunk], keys)
        samples: Ints = self._first[chunk] + offset
        return samples

    def leases(self, positions: Ints) -> tuple[Ints, Ints, Ints]:
        """Return, for each position: the chunk it reads, the stream that reads it, and until when.

        The last is the highest position of the epoch at which this stream reads this chunk: after it the chunk's
        buffer may go. A chunk cut by the border of two streams is read by both.
        """
        q, streams = self._row(positions)
        if self._counts is None:
            return self._chunk(q), streams, np.array(positions, np.int64)
        place = np.searchsorted(self._cum, q, side="right") - 1
        # The stream's run ends at (stream + 1) * run; the left-over behind all runs ends at n.
        run_end = np.where(streams < self.streams, (streams + 1) * self._run, self._n)
        last_q = np.minimum(self._cum[place + 1], run_end) - 1
        return self._permuted_chunks[place], streams, self._position(last_q, streams)

    def hash(self) -> str:
        """Return 16 hex digits that name this order: the same wherever data, seed and epoch are the same.

        Covers the chunks and the samples at up to 65,536 evenly spaced positions.
        """
        step = max(1, -(-self._n // _HASHED_POSITIONS))
        digest = xxhash.xxh3_64()
        header = (self._n, self._k, self.streams, self.seed, self.epoch, int(self.shuffle))
        digest.update(np.array(header, "<i8").tobytes())
        if self._counts is not None:
            digest.update(self._counts.astype("<i8").tobytes())
        if self._n:
            digest.update(self.samples(np.arange(0, self._n, step)).astype("<i8").tobytes())
        return digest.hexdigest()

    def __repr__(self) -> str:
        return f"Order(n={self._n}, chunks={self._k}, seed={self.seed}, epoch={self.epoch}, streams={self.streams})"

    def _row(self, positions: Ints) -> tuple[Ints, Ints]:
        """Return the place of each position in the row of permuted chunks, and its stream."""
        positions = np.asarray(positions, np.int64)
        if positions.size and not (positions.min() >= 0 and positions.max() < self._n):
            raise IndexError(f"positions {positions.min()} to {positions.max()} of an order of {self._n} samples")
        turn, stream = np.divmod(positions, self.streams)
        regular = positions < self._run * self.streams
        return (
            np.where(regular, stream * self._run + turn, positions),
            np.where(regular, stream, self.streams),
        )

    def _position(self, q: Ints, streams: Ints) -> Ints:
        return np.where(streams < self.streams, (q - streams * self._run) * self.streams + streams, q)

    def _chunk(self, place: Ints) -> Ints:
        if not self.shuffle:
            return place
        return bijection.permuted(place, np.array([self._n]), self._chunk_key)
