"""The map-style data set: `len`, `[i]`, and a whole batch of samples in one planned read."""

from __future__ import annotations

import copy
import functools
import logging
import operator
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import cloudpickle
import numpy as np
from numpy.typing import ArrayLike

from bucketfeed.cache.disk import DiskCache
from bucketfeed.cache.reader import CachedReader
from bucketfeed.data import views
from bucketfeed.data.allocator import give_freed_memory_back
from bucketfeed.data.plan import order_of
from bucketfeed.data.skip import TOLD, Failure, Skips
from bucketfeed.data.stats import Stats
from bucketfeed.data.temporary import temporary_folder
from bucketfeed.errors import BucketfeedError, CacheError, ConfigError, DecodeError, FormatError
from bucketfeed.formats.beside import with_index
from bucketfeed.formats.decoded import DecodedReader
from bucketfeed.formats.detect import detect
from bucketfeed.formats.format import Format, Ints
from bucketfeed.formats.grid import RowReader
from bucketfeed.formats.index import Index, build_index
from bucketfeed.formats.registry import format_of
from bucketfeed.formats.rows import ArrayIndex
from bucketfeed.formats.samples import AnyChunks, AnyIndex, Bodies
from bucketfeed.store.manifest import Manifest
from bucketfeed.store.ranges import Buffer, RangeReader
from bucketfeed.store.readers import open_reader
from bucketfeed.store.sizes import format_size
from bucketfeed.store.whole import whole

_log = logging.getLogger(__name__)

Decode = Callable[[dict[str, Any]], Any]

# docs/decisions/0002: 1 MiB and 8 MiB were slower at 20 ms, 64 streams no better than 16.
CHUNK_BYTES = 4 << 20
STREAMS = 16


class MapDataset:
    """Samples of an indexed data set by number; made by `open_dataset`.

    Works with the stock DataLoader, samplers and Subset under every start method, and with `bucketfeed.Loader`.
    Pickles small: manifest and index are mapped files, clients are made anew in each process.
    """

    def __init__(
        self, index: AnyIndex, reader: RangeReader, decode: Decode | None = None, max_errors: int | None = None
    ) -> None:
        self.index = index
        self.reader = reader
        self.decode = decode
        self.max_errors = max_errors  # None: a sample that fails is an error
        self._begin()

    def _begin(self) -> None:
        """Count from nothing on."""
        self._samples_read = self._lines_found = 0
        self._skips = Skips(self.max_errors or 0)

    @property
    def manifest(self) -> Manifest:
        """The objects this data set is made of, frozen when it was opened."""
        return self.index.manifest

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes that labels count; empty where they aren't known. See `folder_labels`."""
        return self.index.classes

    @property
    def cache(self) -> DiskCache | None:
        """The node's disk cache that reads go through, if any."""
        return self.reader.cache if isinstance(self.reader, CachedReader) else None

    def chunks(self, chunk_bytes: int = CHUNK_BYTES) -> AnyChunks:
        """Return the chunks that the samples form when cut every `chunk_bytes`."""
        return _chunks(self.index, chunk_bytes)

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, item: int) -> Any:
        """Return one sample; a dict with `"__key__"` and a field of bytes each, unless `decode` made more of it."""
        numbers, buffers = self._read([item])
        try:
            return self._built(numbers[0], buffers[0])
        except (DecodeError, FormatError) as e:
            e.args = (self._told(e, numbers[0]),)
            raise

    def __getitems__(self, items: Sequence[int]) -> list[Any]:
        """Return many samples, read at once: near ranges are merged, all are fetched at the same time.

        Those that fail are left out where the data set was opened with `on_error="skip"`.
        """
        samples, failures = self.build(*self._read(items))
        self._skips.add(failures)
        return samples

    def _read(self, items: Sequence[int]) -> tuple[list[int], list[Buffer]]:
        """Return the numbers of samples counted from the start, and their bytes."""
        samples = self._numbers(np.array([self._checked(item) for item in items], dtype=np.int64))
        ranges = self.index.ranges(samples)
        if isinstance(self.reader, CachedReader):
            chunks = self.chunks()
            within = [chunks.range(chunk) for chunk in chunks.of(samples).tolist()]
            buffers = self.reader.read(ranges, within=within)
        else:
            buffers = self.reader.read(ranges)
        self.reader.counter.add(bytes_read=sum(map(len, buffers)))
        return samples.tolist(), buffers

    def _numbers(self, items: Ints) -> Ints:
        """Return the numbers in the index of samples of this data set."""
        return items

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(len(self)))

    def build(
        self, items: Sequence[int], buffers: Sequence[Buffer], begin: Callable[[int], None] | None = None
    ) -> tuple[list[Any], list[Failure]]:
        """Return samples made from their bytes, each after `begin(item)`, and those that failed and may be left out.

        Raises `FormatError` or `DecodeError` where none may be, or where all failed.
        """
        samples: list[Any] = []
        failures: list[Failure] = []
        for item, buffer in zip(items, buffers, strict=True):
            if begin is not None:
                begin(item)
            try:
                samples.append(self._built(item, buffer))
            except (DecodeError, FormatError) as e:
                if self.max_errors is None or self._lines_found < TOLD:  # the line costs reading the shard up to it
                    self._lines_found += 1
                    e.args = (self._told(e, item),)
                if self.max_errors is None:
                    raise
                failures.append(Failure(item, str(e)))
        if failures and not samples:
            raise DecodeError(
                f"all {len(failures)} samples of a batch failed, so that nothing of it is left; mend the data. The "
                f"last one: {failures[-1].text}"
            )
        return samples, failures

    def _told(self, error: Exception, item: int) -> str:
        """Return the text of an error, with the line it is about."""
        reader = self.reader.inner if isinstance(self.reader, CachedReader) else self.reader
        try:
            line = self.index.line(item, reader)
        except BucketfeedError:  # the store fails as well: that is not what was asked
            line = None
        return str(error) if line is None else f"{error} (line {line:,} of the object)"

    def _built(self, item: int, buffer: Buffer) -> Any:
        """Return sample `item` made from its bytes: parsed by its format, then decoded."""
        sample = self.index.sample(item, buffer)
        self._samples_read += 1
        return sample if self.decode is None else views.decoded(self.decode, sample, self.index, item)

    def build_batch(self, items: Ints, bodies: Bodies) -> Any:
        """Return many samples, made from their bytes at once, where the index `batches`: columns by field."""
        self._samples_read += len(items)
        self.reader.counter.add(bytes_read=bodies.length)
        return self.index.batch(items, bodies)

    def stats(self) -> Stats:
        """Return what this process has read through this data set."""
        return Stats.of(self.reader.counter.counts(), samples=self._samples_read, skipped=self._skips.count)

    def with_shared_files(self, limit_bytes: int) -> MapDataset:
        """Return this data set, reading through a temporary cache where it has none and several processes need one.

        Chunks that hold many samples are wanted by every worker: without a file in common each would fetch them.
        """
        if self.cache is not None or self.reader.is_local or isinstance(self.chunks().counts, int):
            return self
        cache = DiskCache(tempfile.mkdtemp(prefix="shared-", dir=temporary_folder()), limit_bytes)
        return self._with(reader=CachedReader(self.reader, cache))

    def select(self, which: views.Which) -> MapDataset:
        """Return the samples that a slice, whole numbers (any order, also twice) or a mask of truth values names."""
        return self._with(index=views.selected(self.index, which))

    def take(self, n: int) -> MapDataset:
        """Return the first `n` samples, or all where there are fewer."""
        return self.select(slice(whole("n", n, 0)))

    def repeat(self, times: int) -> MapDataset:
        """Return all samples `times` times: an epoch of it has each that often."""
        return self._with(index=views.repeated(self.index, times))

    def split(
        self, fraction: float, seed: int = 0, *, by: Literal["shard"] | ArrayLike | None = None
    ) -> tuple[MapDataset, MapDataset]:
        """Return two parts that share no sample, the first with `fraction` (0 to 1) of them; each in this one's order.

        The same for the same number of samples and seed, on every machine. `by` keeps together what must not be
        parted: "shard" all samples of an object, an array of one name a sample all samples of that name. The share is
        exact to one sample, with `by` as near as whole groups in a random order come.
        """
        first, second = views.split(self.index, fraction, seed, by)
        return self._with(index=first), self._with(index=second)

    def map(self, fn: Callable[[Any], Any]) -> MapDataset:
        """Return this data set with `fn` called on each sample, after its decode function."""
        return views.mapped(self, fn)

    def _with(self, **changes: Any) -> MapDataset:
        """Return a copy in which some attributes are others."""
        changed = copy.copy(self)
        changed.__dict__.update(changes)
        changed._begin()
        return changed

    def _checked(self, item: int) -> int:
        i = operator.index(item)
        n = len(self)
        if not -n <= i < n:
            raise IndexError(f"sample {i} of a data set of {n} samples ({self.manifest.url})")
        return i + n if i < 0 else i

    def __copy__(self) -> MapDataset:
        copied = type(self).__new__(type(self))
        copied.__dict__.update(self.__dict__)
        return copied

    def __reduce__(self) -> tuple[Callable[[type[MapDataset], bytes], MapDataset], tuple[type[MapDataset], bytes]]:
        # cloudpickle: decode may be a lambda or a function of a notebook.
        counted = ("_samples_read", "_lines_found", "_skips")
        state = {name: value for name, value in self.__dict__.items() if name not in counted}
        return _unpickle, (type(self), cloudpickle.dumps(state))

    def __repr__(self) -> str:
        return (
            f"MapDataset({self.manifest.url!r}, format={self.index.format!r}, samples={len(self):,}, "
            f"objects={len(self.manifest):,}, cache={self.cache!r})"
        )


def _unpickle(kind: type[MapDataset], state: bytes) -> MapDataset:
    dataset = kind.__new__(kind)
    dataset.__dict__.update(cloudpickle.loads(state))
    dataset._begin()
    return dataset


@functools.lru_cache(maxsize=8)
def _chunks(index: AnyIndex, chunk_bytes: int) -> AnyChunks:
    return index.chunks(chunk_bytes)


def open_dataset(
    url: str | os.PathLike[str],
    *,
    format: str | Format = "auto",
    decode: Decode | None = None,
    cache: DiskCache | Literal["auto"] | None = "auto",
    storage_options: dict[str, Any] | None = None,
    index: Index | str | os.PathLike[str] | None = None,
    progress: bool = True,
    on_error: Literal["raise", "skip"] = "raise",
    max_errors: int = 100,
) -> MapDataset:
    """Return the samples under `url` as a data set with `len` and random access.

    The prefix (or single object) is listed once and frozen; then each format's index is built with a progress bar,
    or found in the cache folder from an earlier run.

    Args:
        url: `s3://bucket/prefix/`, `gs://`, a path, `memory://` or any other fsspec URL. Keys are taken exactly.
        format: "auto" (by the names found), "raw" (one object, one sample), "tar" (WebDataset shards), "jsonl", "text",
            "csv" or "tsv" (a line or row, one sample), "arrays" (`.npy`, `.npz`, HDF5, Zarr: see `open_arrays`); or a
            format with options, such as `bf.Csv(delimiter=";")`.
        decode: gets a sample (dict of `"__key__"` and bytes by field) and returns anything; None leaves bytes.
        cache: a `DiskCache`; "auto" takes the default folder, except for data that lies on this machine; None reads
            without a cache and forgets the index with the process.
        storage_options: as fsspec spells them for the URL's file system (key, secret, token, anon, profile,
            endpoint_url, requester_pays, ...); without them the environment, profile or instance role is used.
        index: an `Index`, which is taken as it is, and nothing is listed; or the path or URL where to keep the index.
            What is there is used where it fits the objects listed; else only shards that differ are indexed, and it is
            replaced.
        progress: show bars where listing or indexing takes longer than a second.
        on_error: what becomes of samples that can't be parsed or decoded: "raise", or "skip", which leaves them out
            of their batch, logs the first few and counts them in `stats().skipped`; `ds[i]` raises in any case.
        max_errors: how many different samples "skip" may leave out, in each process that reads through the data set
            or, over all its workers, in a Loader.

    Raises: `NotFoundError`, `AccessError`, `FormatError`, `ConfigError`, `CacheError`.
    """
    if decode is not None and not callable(decode):
        raise ConfigError(f"decode must be a function of one sample, or None, not {decode!r}")
    if on_error not in ("raise", "skip"):
        raise ConfigError(f"on_error must be 'raise' or 'skip', not {on_error!r}")
    max_errors = whole("max_errors", max_errors, 0)
    inner = open_reader(url, storage_options)
    kept, folder = _kept(cache)
    if isinstance(index, Index):
        decodes = index.decodes
    else:
        manifest = Manifest.from_url(os.fspath(url), storage_options=storage_options, folder=folder, progress=progress)
        if format in ("auto", "tar"):
            manifest = with_index(manifest, inner, folder, index)
        known = format_of(detect(manifest) if format == "auto" else format)
        decodes = known.decodes(manifest)
    if decodes:  # what is decoded is kept in any case
        kept = kept or DiskCache(tempfile.mkdtemp(prefix="shared-", dir=temporary_folder()))
    elif inner.is_local and cache == "auto":  # what lies here already needs no copy
        kept = None
    if not isinstance(index, Index):
        index = build_index(
            manifest,
            known,
            inner,
            cache=kept,
            folder=folder,
            path=index,
            chunk_bytes=CHUNK_BYTES,
            progress=progress,
            storage_options=storage_options,
        )
        give_freed_memory_back()
        if kept is not None:
            kept.indexed()
        if index.decodes and kept is None:  # which only its headers tell
            kept = DiskCache(tempfile.mkdtemp(prefix="shared-", dir=temporary_folder()))
    reader: RangeReader = inner
    if isinstance(index, ArrayIndex) and index.decodes and kept is not None:
        reader = RowReader(inner, kept, index)
    elif kept is not None and index.format == "parquet":
        from bucketfeed.formats.parquet_reader import open_parquet

        _tell_of_room(index, kept)
        reader = open_parquet(inner, kept, index)
    elif kept is not None:
        if decodes:
            _tell_of_room(index, kept)
        reader = DecodedReader(inner, kept, index.chunks(CHUNK_BYTES)) if decodes else CachedReader(inner, kept)
    return MapDataset(index, reader, decode, max_errors if on_error == "skip" else None)


def _tell_of_room(index: Index, cache: DiskCache) -> None:
    total = index.chunks(CHUNK_BYTES).total_bytes
    if total > cache.limit_bytes:
        _log.warning(
            "the samples of %s take %s decompressed, and the cache in %s holds %s: what does not fit is decompressed "
            "again in every epoch; give it more room by cache=DiskCache(folder, limit_bytes=...), or store the shards "
            "as they are",
            index.manifest.url,
            format_size(total),
            cache.folder,
            format_size(cache.limit_bytes),
        )


def _kept(cache: DiskCache | Literal["auto"] | None) -> tuple[DiskCache | None, Path]:
    """Return the cache that is meant, and the folder for manifest and index."""
    if cache not in ("auto", None) and not isinstance(cache, DiskCache):
        raise ConfigError(f"cache must be a bucketfeed.DiskCache, 'auto' or None, not {cache!r}")
    if cache == "auto":
        try:
            cache = DiskCache()
        except CacheError as e:
            _log.warning("going on without a cache: %s", e)
            cache = None
    return cache, temporary_folder() if cache is None else cache.index_folder


def order_hash(dataset: MapDataset, seed: int, epoch: int) -> str:
    """Return a short hex name of the global order of `epoch`: equal wherever data, seed and epoch are."""
    return order_of(dataset.chunks(), seed=seed, epoch=epoch, streams=STREAMS, shuffle=True).hash()
