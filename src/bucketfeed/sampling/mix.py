"""Which source each position of a mix draws from: exact shares by arithmetic, with no table of n entries.

The sources are the leaves of a binary tree, the rarest lowest (Huffman: A method for the construction of
minimum-redundancy codes, 1952). Each node deals its positions out to two sides: one draw for the left side somewhere
in each of as many windows, all of the same length, as that side has draws. Both ways, from position to draw and back,
are whole-number formulas; where in its window a draw lies is hashed, so that no rank always meets the same source.
"""

from __future__ import annotations

import bisect
import functools
import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeAlias

import numpy as np
import xxhash
from numpy.typing import NDArray

from bucketfeed.sampling import bijection
from bucketfeed.sampling.order import Order

Ints = NDArray[np.int64]

MOST_POSITIONS = 2**31  # of an epoch: products of two counts stay below 2**63
_KEPT_ORDERS = 4  # of each source: the passes that a block of positions touches, one or two unless it is tiny
_HASHED_POSITIONS = 65_536


@dataclass(frozen=True, slots=True)
class _Node:
    """Two sides, each a source (0 or more) or another node (-1 - its number), and the left one's share of the two."""

    left: int
    right: int
    share: Fraction


@dataclass(frozen=True)
class Mix:
    """Sources of `sizes` samples that have `shares` (which add up to 1) of an endless row, `length` of it an epoch."""

    shares: tuple[Fraction, ...]
    sizes: tuple[int, ...]
    length: int

    @functools.cached_property
    def nodes(self) -> tuple[_Node, ...]:
        """The tree's nodes, each after those below it; none for a single source."""
        heap = [(share, number) for number, share in enumerate(self.shares)]
        heapq.heapify(heap)
        nodes: list[_Node] = []
        while len(heap) > 1:
            (rare, left), (often, right) = heapq.heappop(heap), heapq.heappop(heap)
            nodes.append(_Node(left, right, rare / (rare + often)))
            heapq.heappush(heap, (rare + often, -len(nodes)))
        return tuple(nodes)

    def drawn(self, positions: int) -> dict[int, int]:
        """Return how many of the row's first `positions` go to each source and, by -1 - its number, each node."""
        counts = {-len(self.nodes) if self.nodes else 0: positions}
        for number in reversed(range(len(self.nodes))):
            node, n = self.nodes[number], counts[-1 - number]
            counts[node.left] = int(n * node.share + Fraction(1, 2))
            counts[node.right] = n - counts[node.left]
        return counts


def length_of(shares: tuple[Fraction, ...], sizes: tuple[int, ...], stop: str) -> int:
    """Return how long an epoch is: as long as no source comes twice ("first"), or until all came whole ("all").

    That is what the shares say, but for rounding. More than `MOST_POSITIONS` where it would have to be.
    """
    limits = [size / share for size, share in zip(sizes, shares, strict=True)]
    row, sources = Mix(shares, sizes, 1), range(len(sizes))

    def is_over(length: int) -> bool:
        drawn = row.drawn(length)
        if stop == "first":
            return any(drawn[source] > sizes[source] for source in sources)
        return all(drawn[source] >= sizes[source] for source in sources)

    found = bisect.bisect_left(range(MOST_POSITIONS + 2), True, key=is_over)
    return min(found - 1, int(min(limits))) if stop == "first" else max(found, -int(-max(limits) // 1))


class Schedule:
    """One epoch of a mix: position to (source, which draw of it), and back.

    Args:
        mix: the sources.
        epoch: whose positions these are: 0 to `mix.length` - 1.
        seed: of where draws lie in their windows; None puts them in the middle.
    """

    def __init__(self, mix: Mix, epoch: int, seed: int | None) -> None:
        self._nodes = mix.nodes
        before, after = mix.drawn(epoch * mix.length), mix.drawn((epoch + 1) * mix.length)
        self.before = [before[source] for source in range(len(mix.shares))]  # draws in earlier epochs
        self.counts = {side: after[side] - before[side] for side in after}
        self._keys = [
            None if seed is None else bijection.key(seed, epoch, 2, number) for number in range(len(self._nodes))
        ]
        self._parents = {side: number for number, node in enumerate(self._nodes) for side in (node.left, node.right)}

    def draws(self, positions: Ints) -> tuple[Ints, Ints]:
        """Return, for each position, the source and how many of its draws in this epoch come before."""
        sources, draws = np.zeros(len(positions), np.int64), np.zeros(len(positions), np.int64)
        waiting = [(-len(self._nodes) if self._nodes else 0, np.arange(len(positions)), positions)]
        while waiting:
            side, places, n = waiting.pop()
            if side >= 0:
                sources[places], draws[places] = side, n
                continue
            node = self._nodes[-1 - side]
            left, number = self._dealt(-1 - side, n)
            waiting.append((node.left, places[left], number[left]))
            waiting.append((node.right, places[~left], number[~left]))
        return sources, draws

    def positions(self, source: int, draws: Ints) -> Ints:
        """Return the position of each of the draws of `source`."""
        side, n = source, draws
        while (number := self._parents.get(side)) is not None:
            n = self._taken(number, side == self._nodes[number].left, n)
            side = -1 - number
        return n

    def _dealt(self, number: int, n: Ints) -> tuple[NDArray[np.bool_], Ints]:
        """Return which of a node's positions are its left side's, and which draw of their side they are."""
        total, lefts = self.counts[-1 - number], self.counts[self._nodes[number].left]
        if not lefts:
            return np.zeros(len(n), bool), n
        window = ((n + 1) * lefts - 1) // total
        at = window * total // lefts + self._offsets(number, window)
        left = n == at
        return left, np.where(left, window, n - window - (n > at))

    def _taken(self, number: int, left: bool, n: Ints) -> Ints:
        """Return the node's position at which a side has its draw `n`."""
        total, lefts = self.counts[-1 - number], self.counts[self._nodes[number].left]
        if left:
            return n * total // lefts + self._offsets(number, n)
        if not lefts:
            return n
        window = ((n + 1) * lefts - 1) // (total - lefts)
        start = window * total // lefts
        offset = n - (start - window)
        return start + offset + (offset >= self._offsets(number, window))

    def _offsets(self, number: int, window: Ints) -> Ints:
        """Return where in each window the left side's draw lies."""
        total, lefts = self.counts[-1 - number], self.counts[self._nodes[number].left]
        length = (window + 1) * total // lefts - window * total // lefts
        key = self._keys[number]
        if key is None:
            return length // 2
        return (bijection.mixed(key ^ window.astype(np.uint64)) % length.astype(np.uint64)).astype(np.int64)


class MixOrder:
    """The order of one epoch of a mix: position to sample, as `Order` tells it of one data set.

    Each source is drawn in orders of its own, one for each pass over it, which go on from epoch to epoch. Samples are
    numbered through the sources; n more for each further pass that begins in this epoch, n being the samples of all.

    Args:
        mix: the sources.
        counts: for each source, samples in each chunk; or its size, for chunks of one sample each.
        seed, epoch, streams, shuffle: see `Order`; the sources share the streams out by their shares. Without shuffling
            each epoch is the same, and each source comes in its own order.
    """

    def __init__(
        self,
        mix: Mix,
        counts: Sequence[Ints | int],
        *,
        seed: int = 0,
        epoch: int = 0,
        streams: int = 16,
        shuffle: bool = True,
    ) -> None:
        self.mix = mix
        self.seed = seed
        self.epoch = epoch if shuffle else 0
        self.streams = streams
        self.shuffle = shuffle
        self._schedule = Schedule(mix, self.epoch, seed if shuffle else None)
        self._counts = counts
        self._streams = [max(1, round(streams * share)) for share in mix.shares]
        self._seeds = [int(bijection.key(seed, source)[0]) for source in range(len(counts))]
        self._first_pass = [before // size for before, size in zip(self._schedule.before, mix.sizes, strict=True)]
        chunks = (len(count) if isinstance(count, np.ndarray) else count for count in counts)
        self._first_sample = list(itertools.accumulate(mix.sizes, initial=0))
        self._first_chunk = list(itertools.accumulate(chunks, initial=0))
        self._first_stream = list(itertools.accumulate(self._streams, initial=0))
        self._order = functools.lru_cache(_KEPT_ORDERS * len(counts))(self._made)

    def __len__(self) -> int:
        return self.mix.length

    def samples(self, positions: Ints) -> Ints:
        """Return the sample at each position; both have shape (m,). Raises `IndexError` outside 0 .. n-1."""
        found = np.empty(len(positions), np.int64)
        for source, number, places, own in self._by_pass(positions):
            first = self._first_sample[source] + self._first_sample[-1] * (number - self._first_pass[source])
            found[places] = self._order(source, number).samples(own) + first
        return found

    def leases(self, positions: Ints) -> tuple[Ints, Ints, Ints]:
        """Return, for each position, the chunk it reads, the stream that reads it, and until when; see `Order`.

        A stream is one of a source's in one pass over it. What a pass reads beyond this epoch ends with it.
        """
        chunks, streams, last = (np.empty(len(positions), np.int64) for _ in range(3))
        for source, number, places, own in self._by_pass(positions):
            chunk, stream, until = self._order(source, number).leases(own)
            chunks[places] = chunk + self._first_chunk[source]
            later = self._first_stream[-1] * (number - self._first_pass[source])
            streams[places] = stream + self._first_stream[source] + later
            draws = until + number * self.mix.sizes[source] - self._schedule.before[source]
            end = self._schedule.counts[source] - 1
            last[places] = np.where(
                draws > end, len(self) - 1, self._schedule.positions(source, np.minimum(draws, end))
            )
        return chunks, streams, last

    def hash(self) -> str:
        """Return 16 hex digits that name this order; see `Order.hash`."""
        parts = (*self.mix.shares, *self.mix.sizes, len(self), self.streams, self.seed, self.epoch, int(self.shuffle))
        digest = xxhash.xxh3_64(" ".join(map(str, parts)).encode())
        for count in self._counts:
            digest.update(np.atleast_1d(count).astype("<i8").tobytes())
        step = max(1, -(-len(self) // _HASHED_POSITIONS))
        digest.update(self.samples(np.arange(0, len(self), step)).astype("<i8").tobytes())
        return digest.hexdigest()

    def _by_pass(self, positions: Ints) -> list[tuple[int, int, Ints, Ints]]:
        """Return (source, pass, places in `positions`, positions in that pass) for all that are drawn from."""
        p = np.asarray(positions, np.int64)
        if p.size and not (p.min() >= 0 and p.max() < len(self)):
            raise IndexError(f"positions {p.min()} to {p.max()} of an order of {len(self)} samples")
        sources, draws = self._schedule.draws(p)
        found = []
        for source in np.unique(sources).tolist():
            places = np.flatnonzero(sources == source)
            passes, own = np.divmod(draws[places] + self._schedule.before[source], self.mix.sizes[source])
            for number in np.unique(passes).tolist():
                among = passes == number
                found.append((source, number, places[among], own[among]))
        return found

    def _made(self, source: int, number: int) -> Order:
        return Order(
            self._counts[source],
            seed=self._seeds[source],
            epoch=number,
            streams=self._streams[source],
            shuffle=self.shuffle,
        )


AnyOrder: TypeAlias = Order | MixOrder
