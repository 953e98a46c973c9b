"""Which samples of a data set go into which shard, known before any is written, so that each can be written alone."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np

from bucketfeed.data.packing import Packing, Part, dotless, numbered
from bucketfeed.errors import ConfigError, DecodeError, FormatError
from bucketfeed.formats import raw
from bucketfeed.formats.format import Ints
from bucketfeed.formats.members import END, header, is_plain, padded
from bucketfeed.sampling import bijection

_LEAST_DIGITS = 6
_BLOCK = 65_536
_PROBED = 64
_SPARE = 1.05  # of sizes that are estimated: a part that is too large becomes a full shard and a small one


@dataclass(frozen=True)
class Plan:
    """What is written where: consecutive units of `order` between two `cuts` make a part.

    Attributes:
        first: number of each unit's first sample, and the number of samples; a unit becomes one sample.
        order: which unit comes at each place; None where they come as they are.
        cuts: the place of each part's first unit, and the number of units.
        total_bytes: of all parts, estimated unless all sizes are known.
    """

    first: Ints
    order: Ints | None
    cuts: list[int]
    total_bytes: int

    def __len__(self) -> int:
        return len(self.cuts) - 1

    def part(self, number: int) -> Part:
        """Return what the task for part `number` needs."""
        start, stop = self.cuts[number : number + 2]
        samples: Any
        if self.order is None:
            samples = range(int(self.first[start]), int(self.first[stop]))
        else:
            units = self.order[start:stop]
            spans = zip(self.first[units].tolist(), self.first[units + 1].tolist(), strict=True)
            samples = np.array([i for a, b in spans for i in range(a, b)], np.int64)
        return Part(number, max(_LEAST_DIGITS, len(str(len(self) - 1))), samples, start)


def planned(packing: Packing, shuffle: int | None, cuts: list[int] | None = None) -> Plan:
    """Return the plan for all samples of the data set, in the order that the seed `shuffle` names.

    Cut at `cuts` if they are given. Sizes are exact for objects as they are and for tars of ours, else estimated.
    """
    index = packing.dataset.index
    if not len(index):
        raise ConfigError(f"{index.manifest.url} has no samples to write")
    first, sizes = _objects(packing) if packing.paired else _estimated(packing)
    order = None
    if shuffle is not None:
        n = len(sizes)
        order = bijection.permuted(np.arange(n), np.array([n]), bijection.key(shuffle, n))
    cuts = cuts or _cuts(sizes if order is None else sizes[order], packing.max_bytes)
    return Plan(first, order, cuts, int(sizes.sum()))


def _cuts(sizes: Ints, max_bytes: int) -> list[int]:
    ends = np.cumsum(sizes)
    cuts, room = [0], max_bytes - len(END)
    while cuts[-1] < len(sizes):
        before = int(ends[cuts[-1] - 1]) if cuts[-1] else 0
        cuts.append(max(cuts[-1] + 1, int(np.searchsorted(ends, before + room, side="right"))))
    return cuts


def _objects(packing: Packing) -> tuple[Ints, Ints]:
    """Return units and sizes of objects that are samples: neighbours of one key are one unit."""
    index = packing.dataset.index
    first, sizes = [], []
    last = None
    for at in range(0, len(index), _BLOCK):
        numbers = np.arange(at, min(at + _BLOCK, len(index)))
        for i, where in zip(numbers.tolist(), index.ranges(numbers), strict=True):
            key, field = raw.names(index.name(i) or "")
            key = dotless(key)
            path = f"{f'{i:012}' if packing.keys == 'number' else key}.{field}"
            size = padded(where.length) + (512 if is_plain(path, where.length) else len(header(path, where.length)))
            if key == last:
                sizes[-1] += size
            else:
                first.append(i)
                sizes.append(size)
            last = key
    return np.array([*first, len(index)]), np.array(sizes)


def _estimated(packing: Packing) -> tuple[Ints, Ints]:
    """Return a unit for each sample, and sizes: what their ranges take, times what a few samples take of that."""
    index = packing.dataset.index
    n = len(index)
    own = 0 if index.format == "tar" else 512
    blocks = (index.ranges(np.arange(at, min(at + _BLOCK, n))) for at in range(0, n, _BLOCK))
    sizes = np.array([padded(where.length) + own for where in itertools.chain.from_iterable(blocks)])
    real = guessed = 0
    exact = True
    for i in np.unique(np.linspace(0, n - 1, _PROBED, dtype=np.int64)).tolist():
        try:
            [sample] = numbered(packing.samples([i]), packing.keys, i)
        except (DecodeError, FormatError):
            if packing.dataset.max_errors is None:
                raise
            continue
        real += sample.size
        guessed += int(sizes[i])
        exact &= sample.size == sizes[i]
    if guessed and not exact:
        sizes = np.maximum(1024, sizes * (real / guessed * _SPARE)).astype(np.int64)
    return np.arange(n + 1), sizes
