"""How ranks share an epoch: rank r of w takes positions r, r + w, r + 2w, ... in batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from bucketfeed.errors import ConfigError
from bucketfeed.sampling.topology import Topology
from bucketfeed.store.whole import whole

Tail: TypeAlias = Literal["drop", "pad", "uneven"]


@dataclass(frozen=True, slots=True)
class Division:
    """One rank's batches of the positions from `start` to `length`.

    Batch b of all ranks together covers `batch_size * world_size` consecutive positions. Of what is left at the end,
    "drop" gives nothing, "pad" a full batch to each rank by repeating positions from the epoch's beginning, "uneven"
    what there is, so that some ranks have a shorter batch or one less.

    Raises `ConfigError` where "drop" would leave nothing of a whole epoch.
    """

    length: int
    batch_size: int
    topology: Topology
    tail: Tail = "drop"
    start: int = 0

    def __post_init__(self) -> None:
        if self.tail not in get_args(Tail):
            raise ConfigError(f"tail must be 'drop', 'pad' or 'uneven', not {self.tail!r}")
        whole("batch_size", self.batch_size, 1)
        whole("start", self.start, 0, whole("length", self.length, 0))
        if self.tail == "drop" and self.length < self._global_batch:
            raise ConfigError(
                f"one batch of {self.batch_size} samples on each of {self.topology.world_size} ranks takes "
                f"{self._global_batch} samples, but the data set has {self.length}: make batch_size smaller, or "
                "pass tail='pad' or tail='uneven'"
            )
        if self.tail == "pad" and not self.length:
            raise ConfigError("tail='pad' has nothing to repeat: the data set is empty")

    @property
    def _global_batch(self) -> int:
        return self.batch_size * self.topology.world_size

    def __len__(self) -> int:
        left = self.length - self.start
        if self.tail == "drop":
            return left // self._global_batch
        if self.tail == "pad":
            return -(-left // self._global_batch)
        own = max(0, -(-(left - self.topology.rank) // self.topology.world_size))
        return -(-own // self.batch_size)

    @property
    def is_over(self) -> bool:
        """Whether no rank has anything left: this one alone may have none at an uneven end."""
        left = self.length - self.start
        return left < self._global_batch if self.tail == "drop" else left <= 0

    def positions(self, batch: int) -> NDArray[np.int64]:
        """Return the global positions of this rank's batch, shape (batch_size,), or less at an uneven end."""
        positions = self._first(batch) + self.topology.world_size * np.arange(self.batch_size)
        return positions % self.length if self.tail == "pad" else positions[positions < self.length]

    def padded(self, batch: int) -> int:
        """Return how many samples at the end of this batch are repeats."""
        if self.tail != "pad":
            return 0
        new = max(0, -(-(self.length - self._first(batch)) // self.topology.world_size))
        return max(0, self.batch_size - new)

    def consumed(self, batch: int) -> int:
        """Return the global position once every rank has taken this batch; at most `length`."""
        return min(self.length, self.start + (batch + 1) * self._global_batch)

    def passed(self, batch: int, positions: NDArray[np.int64]) -> int:
        """Return the position up to which the epoch wants nothing more once this batch, of `positions`, is done."""
        return int(positions.max())

    def _first(self, batch: int) -> int:
        if not 0 <= batch < len(self):
            raise IndexError(f"batch {batch} of {len(self)}")
        return self.start + batch * self._global_batch + self.topology.rank
