"""Views of a data set: some of its samples, two parts of them, the same ones several times, or each made into more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from bucketfeed.errors import BucketfeedError, ConfigError, DecodeError
from bucketfeed.formats.samples import AnyIndex, Ints
from bucketfeed.formats.view import Numbers, ViewIndex
from bucketfeed.sampling import bijection
from bucketfeed.store.whole import whole

if TYPE_CHECKING:
    from bucketfeed.data.dataset import MapDataset

Which: TypeAlias = "slice | range | ArrayLike"
_BLOCK = 1 << 20
_MOST_WORD = 2**64 - 1


class Unfixed(ViewIndex):
    """All samples that some data set draws from, which ones depends on the epoch: no views can be made of it."""


def check_fixed(index: AnyIndex, what: str) -> None:
    """Raise `ConfigError` where `what` can't be made of an index."""
    if isinstance(index, Unfixed):
        raise ConfigError(
            f"{what} of a mix: each epoch of it has other samples of its sources. Make views of the sources and mix "
            "those; a mix of another length is made by mix(..., length=n)"
        )


def selected(index: AnyIndex, which: Which) -> AnyIndex:
    """Return the index of the samples that `which` names: a slice, a mask (one truth value a sample) or numbers."""
    check_fixed(index, "select")
    n = len(index)
    if isinstance(which, slice):
        try:
            return _view(index, range(n)[which])
        except TypeError as e:
            raise ConfigError(f"select takes a slice of whole numbers, not {which!r}") from e
    if isinstance(which, range):
        numbers: Any = which
        ends = [which[0], which[-1]] if len(which) else []
        if not any(end < 0 for end in ends):
            _check(ends, n, index)
            return _view(index, numbers)
    numbers = np.asarray(which)
    if numbers.ndim != 1 or (numbers.size and numbers.dtype.kind not in "iub"):
        raise ConfigError(
            "select takes a slice, whole numbers, or one truth value a sample, not "
            f"{type(which).__name__} of {numbers.dtype}, shape {numbers.shape}"
        )
    if numbers.dtype.kind == "b":
        if len(numbers) != n:
            raise ConfigError(f"the mask has {len(numbers)} truth values, but {index.manifest.url} has {n} samples")
        return _view(index, np.flatnonzero(numbers))
    if numbers.size:
        _check([int(numbers.min()), int(numbers.max())], n, index)
    numbers = numbers.astype(np.int64)
    return _view(index, np.where(numbers < 0, numbers + n, numbers))


def _check(ends: Sequence[int], n: int, index: AnyIndex) -> None:
    for end in ends:
        if not -n <= end < n:
            raise IndexError(f"select: sample {end} of a data set of {n} samples ({index.manifest.url})")


def _view(index: AnyIndex, numbers: range | Ints) -> AnyIndex:
    if isinstance(index, ViewIndex):
        return ViewIndex(index.base, index.numbers.taken(numbers))
    return ViewIndex(index, Numbers.of(numbers))


def repeated(index: AnyIndex, times: int) -> AnyIndex:
    """Return the index that has all samples of `index` `times` times, one round after the other."""
    check_fixed(index, "repeat")
    times = whole("times", times, 1)
    if isinstance(index, ViewIndex):
        return ViewIndex(index.base, Numbers(index.numbers.listed, index.numbers.times * times))
    return ViewIndex(index, Numbers(range(len(index)), times))


def split(
    index: AnyIndex, fraction: float, seed: int, by: Literal["shard"] | ArrayLike | None
) -> tuple[AnyIndex, AnyIndex]:
    """Return two parts of `index` that share no sample; see `MapDataset.split`."""
    check_fixed(index, "split")
    if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0 <= fraction <= 1:
        raise ConfigError(f"split takes the first part's share, from 0 to 1, not {fraction!r}")
    n = len(index)
    key = bijection.key(whole("seed", seed, 0, _MOST_WORD), n)
    size = round(fraction * n)
    groups = _groups(index, by)
    sizes = None if groups is None else np.bincount(groups)
    cut = size if sizes is None else _cut(sizes, size, key)
    mask = np.empty(n, bool)
    for at in range(0, n, _BLOCK):
        places = np.arange(at, min(at + _BLOCK, n))
        values = places if groups is None else groups[places]
        among = np.array([n if sizes is None else len(sizes)])
        mask[places] = bijection.permuted(values, among, key) < cut
    return _view(index, np.flatnonzero(mask)), _view(index, np.flatnonzero(~mask))


def _groups(index: AnyIndex, by: Literal["shard"] | ArrayLike | None) -> Ints | None:
    """Return the number of the group that each sample belongs to; None where each is by itself."""
    if by is None:
        return None
    if isinstance(by, str):
        if by != "shard":
            raise ConfigError(f"split by={by!r}: pass 'shard', or an array that names each sample's group")
        names: Any = index.locate(np.arange(len(index)))[0]
    else:
        names = np.asarray(by)
    if names.shape != (len(index),):
        raise ConfigError(f"split by= names {names.shape} groups, not one for each of the {len(index)} samples")
    return np.unique(names, return_inverse=True)[1].astype(np.int64)


def _cut(sizes: Ints, size: int, key: bijection.Words) -> int:
    """Return how many of the shuffled groups come nearest to `size` samples."""
    order = np.argsort(bijection.permuted(np.arange(len(sizes)), np.array([len(sizes)]), key))
    return int(np.abs(np.concatenate([[0], np.cumsum(sizes[order])]) - size).argmin())


@dataclass(frozen=True, slots=True)
class Then:
    """A decode function that does one thing after the other."""

    first: Callable[[Any], Any]
    second: Callable[[Any], Any]

    def __call__(self, sample: Any) -> Any:
        """Return what the second makes of what the first made of `sample`."""
        return self.second(self.first(sample))


def mapped(dataset: MapDataset, fn: Callable[[Any], Any]) -> MapDataset:
    """Return `dataset` with `fn` called on each sample after its decode function."""
    if not callable(fn):
        raise ConfigError(f"map takes a function of one sample, not {fn!r}")
    return dataset._with(decode=fn if dataset.decode is None else Then(dataset.decode, fn))


def unchanged(sample: Any) -> Any:
    """Return `sample`: the decode function of data sets whose parts have others, so that these run in threads."""
    return sample


def with_fields(sample: Any, fields: dict[str, Any], what: str) -> dict[str, Any]:
    """Return `sample` with more fields; what is no dict becomes field `value`. Raises `DecodeError` for one twice."""
    known = sample if isinstance(sample, dict) else {"value": sample}
    if both := known.keys() & fields.keys():
        raise DecodeError(
            f"{what}: the sample has a field {min(map(str, both))!r} of its own; rename one of them, by map or in the "
            "labels"
        )
    return {**known, **fields}


def decoded(decode: Callable[[Any], Any], sample: Any, index: AnyIndex, item: int) -> Any:
    """Return what `decode` makes of sample `item`. Raises `DecodeError`, which names the sample."""
    key = sample.get("__key__") if isinstance(sample, dict) else index.name(item)  # decode may take it away
    try:
        return decode(sample)
    except Exception as e:
        fields = sorted(str(name) for name in sample if name != "__key__") if isinstance(sample, dict) else ()
        text = str(e) if isinstance(e, BucketfeedError) else f"{type(e).__name__}: {e}"
        raise DecodeError(
            f"decode failed for sample {key!r} (number {item}, {index.range(item)}, fields "
            f"{', '.join(fields) or 'none'}): {text}"
        ) from e
