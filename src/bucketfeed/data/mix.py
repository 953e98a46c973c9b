"""Several data sets drawn from in fixed shares, as one."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from fractions import Fraction
from typing import Literal, SupportsFloat

from bucketfeed.data.concat import ConcatDataset, parts_of
from bucketfeed.data.dataset import CHUNK_BYTES, MapDataset
from bucketfeed.data.parts import MixChunks, PartsIndex
from bucketfeed.data.views import Unfixed
from bucketfeed.errors import ConfigError
from bucketfeed.formats.samples import AnyChunks, Ints
from bucketfeed.formats.view import Numbers
from bucketfeed.sampling.mix import MOST_POSITIONS, Mix, MixOrder, length_of
from bucketfeed.store.whole import whole

_CLOSEST = 10**9  # so that a third is a third, whatever its last digits say


class MixDataset(ConcatDataset):
    """Data sets drawn from in fixed shares; made by `mix`."""

    mix: Mix

    def __len__(self) -> int:
        return self.mix.length

    def chunks(self, chunk_bytes: int = CHUNK_BYTES) -> AnyChunks:
        """Return the chunks of all sources; `bucketfeed.data.plan.order_of` makes the mix's order of them."""
        return _chunks(self._parts, self.mix, chunk_bytes)

    def _numbers(self, items: Ints) -> Ints:
        return MixOrder(self.mix, self.mix.sizes, shuffle=False).samples(items)

    def __repr__(self) -> str:
        shares = ", ".join(f"{float(share):.4g}" for share in self.mix.shares)
        return f"MixDataset({self.manifest.url!r}, shares=[{shares}], samples={len(self):,}, cache={self.cache!r})"


def mix(
    datasets: Sequence[MapDataset],
    weights: Sequence[SupportsFloat],
    *,
    stop: Literal["first", "all"] = "first",
    length: int | None = None,
) -> MapDataset:
    """Return the samples of `datasets`, drawn in the proportion of `weights` at every point of a run.

    Which source a position draws from is arithmetic: the counts never leave their exact shares by more than a few
    samples, however long the run, and the order is the same on any number of ranks and workers. A shuffled `Loader`
    goes through each source in orders of that source's own: all of its samples come, in this epoch or the next ones,
    before any comes again. Without shuffling each epoch is `mix[0], mix[1], ...`, the sources in their own order.

    Args:
        datasets: the sources, as for `concat`; one that is smaller than its share is gone through several times.
        weights: one for each, above 0; they need not add up to 1. Fractions and whole numbers are exact.
        stop: how long an epoch is: "first", until a source would come a second time; "all", until each has come whole.
        length: how long it is in samples, instead.

    A mix has no views but `map`: make them of its sources. Raises `ConfigError`.

    >>> both = bf.mix([web, books], weights=[0.8, 0.2], stop="all")
    """
    index, reader, decode, max_errors = parts_of("mix", datasets)
    shares, sizes = _shares(weights, len(index.parts)), tuple(len(part) for part in index.parts)
    if 0 in sizes:
        empty = index.parts[sizes.index(0)].manifest.url
        raise ConfigError(f"mix: data set {sizes.index(0)} ({empty}) has no samples; leave it out")
    if stop not in ("first", "all"):
        raise ConfigError(f"stop must be 'first' or 'all', not {stop!r}")
    if length is None:
        length = length_of(shares, sizes, stop)
    length = whole("the length of a mix", length, 1, MOST_POSITIONS)
    mixed = MixDataset(index, reader, decode, max_errors)
    mixed.mix = Mix(shares, sizes, length)
    times = 3 + max(int(length * share) // size for share, size in zip(shares, sizes, strict=True))
    name = hashlib.blake2b(f"{index.fingerprint} {shares} {length}".encode(), digest_size=16).hexdigest()
    mixed.index = Unfixed(index, Numbers(range(len(index)), times), name)
    return mixed


def _shares(weights: Sequence[SupportsFloat], sources: int) -> tuple[Fraction, ...]:
    exact: list[Fraction] = []
    for weight in weights:
        try:
            value = Fraction(weight if isinstance(weight, int | Fraction) else float(weight))
        except (TypeError, ValueError, OverflowError):
            value = Fraction(0)
        if value <= 0:
            raise ConfigError(f"weights must be numbers above 0, not {weight!r}; leave a data set of no weight out")
        exact.append(value if isinstance(weight, int | Fraction) else value.limit_denominator(_CLOSEST) or value)
    if len(exact) != sources:
        raise ConfigError(f"mix takes one weight for each data set: {sources}, not {len(exact)}")
    return tuple(weight / sum(exact) for weight in exact)


@functools.lru_cache(maxsize=8)
def _chunks(index: PartsIndex, mix: Mix, chunk_bytes: int) -> MixChunks:
    return MixChunks([part.chunks(chunk_bytes) for part in index.parts], mix)
