"""Several data sets one after the other, as one."""

from __future__ import annotations

from collections.abc import Sequence

from bucketfeed.data.dataset import Decode, MapDataset
from bucketfeed.data.parts import DecodedIndex, PartsIndex
from bucketfeed.data.routed import PartsReader
from bucketfeed.data.views import check_fixed, unchanged
from bucketfeed.errors import ConfigError
from bucketfeed.formats.samples import AnyIndex
from bucketfeed.store.ranges import RangeReader


class ConcatDataset(MapDataset):
    """The samples of several data sets, and views of them; made by `concat`."""

    def __init__(
        self,
        parts: PartsIndex,
        reader: PartsReader,
        decode: Decode | None = None,
        max_errors: int | None = None,
    ) -> None:
        super().__init__(parts, reader, decode, max_errors)
        self._parts = parts

    def with_shared_files(self, limit_bytes: int) -> MapDataset:
        """Return this data set, whose parts that have no cache read through a temporary one where they need it."""
        assert isinstance(self.reader, PartsReader)
        readers = self.reader.readers
        shared: dict[int, RangeReader] = {}
        for index, reader in zip(self._parts.parts, readers, strict=True):
            known = shared.get(id(reader), reader)
            if known is reader:
                shared[id(reader)] = MapDataset(index, reader).with_shared_files(limit_bytes // len(readers) + 1).reader
        return self._with(reader=PartsReader([shared[id(reader)] for reader in readers]))


def concat(datasets: Sequence[MapDataset]) -> MapDataset:
    """Return the samples of all `datasets`, one after the other: `len` is the sum, each is read and decoded as before.

    They may differ in format, bucket, cache and decode function, and be views; one may be given twice. The result is a
    data set as any other, with views of its own. A `map` of it comes after those of its parts. For batches, all samples
    need the same fields.

    Raises `ConfigError` where there is nothing to join, or only some of them were opened with `on_error="skip"`.

    >>> bf.concat([bf.open_dataset("s3://a/2023/"), bf.open_dataset("gs://b/2024/")])
    """
    return ConcatDataset(*parts_of("concat", datasets))


def parts_of(what: str, datasets: Sequence[MapDataset]) -> tuple[PartsIndex, PartsReader, Decode | None, int | None]:
    """Return what a `ConcatDataset` of `datasets` is made of."""
    if isinstance(datasets, MapDataset):
        raise ConfigError(f"{what} takes a list of data sets, not a single one")
    datasets = list(datasets)
    if not datasets:
        raise ConfigError(f"{what} of no data sets: give at least one")
    for dataset in datasets:
        if not isinstance(dataset, MapDataset):
            raise ConfigError(f"{what} takes what bucketfeed.open_dataset returns, not {type(dataset).__name__}")
        check_fixed(dataset.index, what)
    limits = [dataset.max_errors for dataset in datasets]
    allowed = [limit for limit in limits if limit is not None]
    if allowed and len(allowed) < len(limits):
        raise ConfigError(f"{what}: open all of these data sets with on_error='skip', or none")
    indexes: list[AnyIndex] = [
        dataset.index if dataset.decode is None else DecodedIndex(dataset.index, dataset.decode) for dataset in datasets
    ]
    reader = PartsReader([dataset.reader for dataset in datasets])
    decode = None if all(dataset.decode is None for dataset in datasets) else unchanged
    return PartsIndex(indexes), reader, decode, sum(allowed) if allowed else None
