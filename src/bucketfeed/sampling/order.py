"""The order of an epoch, as arithmetic: position to sample, with no array of n entries.

Chunks are permuted; each of `streams` streams has its own contiguous run of that permuted row, and positions go
round among the streams; inside a chunk its samples are permuted too. The order depends on the chunks, the seed, the
epoch and the number of streams, and on nothing else: not on ranks, workers, threads or batch size.
"""

from __future__ import annotations

import numpy as np
import xxhash
from numpy.typing import NDArray

from bucketfeed.errors import ConfigError
from bucketfeed.sampling import bijection
from bucketfeed.store.whole import whole

Ints = NDArray[np.int64]

_HASHED_POSITIONS = 65_536
_MOST_SAMPLES = 2**53  # which the permutations hold to
_MOST_WORD = 2**64 - 1


class Order:
    """The bijection from positions 0 .. n-1 of one epoch to samples 0 .. n-1.

    Args:
        counts: samples in each chunk, shape (k,), none of them 0; or an int n, for n chunks of one sample each.
            Memory grows with k, and for an int not at all.
        seed: names the family of orders, one for each epoch; 0 to 2**64 - 1.
        epoch: counts from 0.
        streams: how many chunks are interleaved.
        shuffle: False gives the data set's own order, with one stream.

    Raises `ConfigError` for arguments outside these bounds.

    >>> Order(10, seed=1).samples(np.arange(10)).tolist()
    [5, 2, 6, 3, 1, 0, 9, 4, 7, 8]
    """

    def __init__(
        self, counts: NDArray[np.int64] | int, *, seed: int = 0, epoch: int = 0, streams: int = 16, shuffle: bool = True
    ) -> None:
        self.seed = whole("seed", seed, 0, _MOST_WORD)
        self.epoch = whole("epoch", epoch, 0, _MOST_WORD)
        self.streams = whole("streams", streams, 1) if shuffle else 1
        self.shuffle = shuffle
        self._counts: Ints | None = None
        self._chunk_key = bijection.key(self.seed, self.epoch, 0)
        self._inner_key = bijection.key(self.seed, self.epoch, 1)
        if np.ndim(counts):
            self._lay_out(np.asarray(counts))
        else:
            self._n = self._k = whole("counts", counts, 0, _MOST_SAMPLES)
        self._run = self._n // self.streams  # the samples of each stream but the last, which also has the rest

    def _lay_out(self, counts: NDArray[np.int64]) -> None:
        if counts.ndim != 1 or (counts.size and (counts.dtype.kind not in "iu" or counts.min() < 1)):
            raise ConfigError(
                f"counts must be the number of samples in each chunk, shape (k,), whole and at least 1, not {counts!r}"
            )
        self._counts = counts = counts.astype(np.int64, copy=False)
        self._k = len(counts)
        self._row = np.arange(self._k)
        if self.shuffle:
            self._row = bijection.permuted(self._row, np.array([self._k]), self._chunk_key)
        # Where each chunk starts: in the data set, and in the permuted row of chunks.
        self._first = np.concatenate([[0], np.cumsum(counts)])
        self._cum = np.concatenate([[0], np.cumsum(counts[self._row])])
        self._n = int(self._first[-1])

    def __len__(self) -> int:
        return self._n

    def samples(self, positions: Ints) -> Ints:
        """Return the sample at each position; both have shape (m,). Raises `IndexError` outside 0 .. n-1."""
        q, _ = self._places(positions)
        if self._counts is None:
            return self._single(q)
        k = np.searchsorted(self._cum, q, side="right") - 1
        chunks, offsets = self._row[k], q - self._cum[k]
        if self.shuffle:
            keys = bijection.mixed(self._inner_key ^ chunks.astype(np.uint64))
            offsets = bijection.permuted(offsets, self._counts[chunks], keys)
        samples: Ints = self._first[chunks] + offsets
        return samples

    def leases(self, positions: Ints) -> tuple[Ints, Ints, Ints]:
        """Return, for each position, the chunk it reads, the stream that reads it, and until when; each shape (m,).

        "Until when" is the last position of the epoch at which this stream reads this chunk: after it, what the
        stream holds of the chunk may go. A chunk cut by the border of two streams is read by both, each for itself.
        """
        q, streams = self._places(positions)
        if self._counts is None:
            return self._single(q), streams, np.array(positions, np.int64)
        k = np.searchsorted(self._cum, q, side="right") - 1
        stream_end = np.where(streams < self.streams - 1, (streams + 1) * self._run, self._n)
        last = np.minimum(self._cum[k + 1], stream_end) - 1
        turn = last - streams * self._run
        return self._row[k], streams, np.where(last < self._run * self.streams, turn * self.streams + streams, last)

    def hash(self) -> str:
        """Return 16 hex digits that name this order: the same wherever data, seed and epoch are the same.

        Covers the chunks, and the samples at up to 65,536 evenly spaced positions.
        """
        parts = (self._n, self._k, self.streams, self.seed, self.epoch, int(self.shuffle))
        digest = xxhash.xxh3_64(" ".join(map(str, parts)).encode())
        if self._counts is not None:
            digest.update(self._counts.astype("<i8").tobytes())
        step = max(1, -(-self._n // _HASHED_POSITIONS))
        digest.update(self.samples(np.arange(0, self._n, step)).astype("<i8").tobytes())
        return digest.hexdigest()

    def __repr__(self) -> str:
        how = f"seed={self.seed}, epoch={self.epoch}, streams={self.streams}" if self.shuffle else "shuffle=False"
        return f"Order({self._n} samples in {self._k} chunks, {how})"

    def _places(self, positions: Ints) -> tuple[Ints, Ints]:
        """Return where in the permuted row each position reads, and its stream.

        The n % streams positions at the end, which no whole turn covers, read on in the last stream.
        """
        p = np.asarray(positions, np.int64)
        if p.size and not (p.min() >= 0 and p.max() < self._n):
            raise IndexError(f"positions {p.min()} to {p.max()} of an order of {self._n} samples")
        turn, stream = np.divmod(p, self.streams)
        in_turns = p < self._run * self.streams
        return np.where(in_turns, stream * self._run + turn, p), np.where(in_turns, stream, self.streams - 1)

    def _single(self, q: Ints) -> Ints:
        """Return the chunk, which is the sample, at each place of the row where each chunk is one sample."""
        return bijection.permuted(q, np.array([self._n]), self._chunk_key) if self.shuffle else q
