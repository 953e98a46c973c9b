"""Samples from a source without an index: generator functions, and objects read from front to back."""

from __future__ import annotations

import functools
import itertools
import logging
import multiprocessing
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import cloudpickle
import numpy as np
from torch.utils.data import IterableDataset, get_worker_info

from bucketfeed.data.dataset import CHUNK_BYTES, Decode
from bucketfeed.data.workers import end_with
from bucketfeed.errors import BucketfeedError, ConfigError, DecodeError, ReadError, ResumeError
from bucketfeed.formats.arrays import RowFormat
from bucketfeed.formats.build import shards_of
from bucketfeed.formats.detect import detect
from bucketfeed.formats.format import Format
from bucketfeed.formats.registry import format_of
from bucketfeed.sampling.topology import Topology
from bucketfeed.store.ahead import read_through
from bucketfeed.store.manifest import Manifest
from bucketfeed.store.ranges import RangeReader
from bucketfeed.store.readers import open_reader
from bucketfeed.store.sizes import parse_size
from bucketfeed.store.whole import whole

_log = logging.getLogger(__name__)

Source = Callable[..., Iterable[Any]]


class _Place(NamedTuple):
    """Where an iteration stands: the round, samples given of it, and of all rounds."""

    round: int
    sample: int
    given: int


_START = _Place(0, 0, 0)


class StreamDataset(IterableDataset[Any]):
    """An iterable data set that ranks and workers share out: each sample comes once, wherever it is asked for.

    With `shards`, each rank and worker calls `source(shard)` for its own part of them; without, every one of them
    runs `source()` and keeps its own part of the samples. Use it with torch's DataLoader.

    Args:
        source: a function that returns an iterable of samples; called anew each epoch.
        shards: what to share out instead of single samples (urls, file names, numbers).
        decode: applied to each sample that is kept.
        tail: "uneven" gives every sample, so that some ranks get one more than others; "drop" leaves out the last
            incomplete round, so that all ranks and workers get equally many (not with shards: their sizes are
            unknown).
        topology: this rank and the world's size; found where None.
        shuffle_buffer: samples that each worker holds to draw the next one from; 0 keeps the order. With shards,
            their order is shuffled too. (seed, epoch, part) give the order; set the epoch by `set_epoch`.
        shuffle_buffer_bytes: the most that the buffer holds, by `size_of`, besides the sample that comes in.
        seed: of the shuffling.

    A source may be endless: no more of it is held than the buffer. `state_dict` counts the samples given, and an
    iteration after `load_state_dict` reads the source again up to there, without decoding: it must repeat itself.
    """

    def __init__(
        self,
        source: Source,
        *,
        shards: Sequence[Any] | None = None,
        decode: Decode | None = None,
        tail: Literal["uneven", "drop"] = "uneven",
        topology: Topology | None = None,
        shuffle_buffer: int = 0,
        shuffle_buffer_bytes: int | str = "64MiB",
        seed: int = 0,
    ) -> None:
        if not callable(source):
            raise ConfigError(
                f"source must be a function that returns an iterable, not {type(source).__name__}: an iterator "
                "could be read only once, and not in another process"
            )
        if tail not in ("uneven", "drop"):
            raise ConfigError(f"tail must be 'uneven' or 'drop', not {tail!r}")
        if tail == "drop" and shards is not None:
            raise ConfigError(
                "tail='drop' needs samples shared out one by one: leave out shards=, or use a Loader over an index"
            )
        self._source = source
        self._shards = shards
        self._decode = decode
        self._tail = tail
        self._topology = Topology.detect() if topology is None else topology
        self._most = whole("shuffle_buffer", shuffle_buffer, 0)
        self._most_bytes = parse_size(shuffle_buffer_bytes, "shuffle_buffer_bytes")
        self._seed = whole("seed", seed, 0)
        self._times: int | None = 1
        self._each: int | None = None  # samples of a round
        self._total: int | None = None  # samples of all rounds
        self._epoch = 0
        self._given = self._at = _START
        if self._topology.world_size > 1 and tail == "uneven":
            _log.warning(
                "a stream over %d ranks with tail='uneven' may give them different numbers of batches, which can "
                "block a collective step: use tail='drop', or a Loader over an index",
                self._topology.world_size,
            )

    @classmethod
    def from_generator(cls, fn: Source, shards: Sequence[Any] | None = None, **options: Any) -> StreamDataset:
        """Return the stream of `fn()`, or of `fn(shard)` over `shards`; options as for the class."""
        return cls(fn, shards=shards, **options)

    @classmethod
    def from_tars(cls, url: str, *, storage_options: dict[str, Any] | None = None, **options: Any) -> StreamDataset:
        """Return the samples of the tars under `url` without indexing them; each shard goes to one rank and worker."""
        return cls.from_url(url, format="tar", storage_options=storage_options, **options)

    @classmethod
    def from_url(
        cls,
        url: str | os.PathLike[str],
        *,
        format: str | Format = "auto",
        storage_options: dict[str, Any] | None = None,
        **options: Any,
    ) -> StreamDataset:
        """Return the samples of the objects under `url`, each read from front to back without an index.

        `format` is as for `open_dataset`: lines, rows and tars, compressed or not, or one sample an object. An object
        is a shard and goes to one rank and worker, which holds a few chunks of 4 MiB and one sample of it.
        Raises `ConfigError` for arrays, which have random access without an index, and as `open_dataset` does.
        """
        manifest = Manifest.from_url(url, storage_options=storage_options)
        reader = open_reader(url, storage_options)
        known = format_of(detect(manifest) if format == "auto" else format)
        if isinstance(known, RowFormat):
            raise ConfigError(f"{manifest.url} has arrays, whose rows need no reading in order: use open_dataset")
        known = known.opened(manifest, reader)
        return cls(_FrontToBack(manifest, reader, known), shards=shards_of(manifest, known), **options)

    def repeat(self, times: int | None = None) -> StreamDataset:
        """Return all samples `times` times, without end where None; each round is shuffled anew.

        Raises `ConfigError` for a stream that was cut by `take` after it was repeated.
        """
        if self._total is not None:
            raise ConfigError("repeat() after repeat() and take() has no order of its own: repeat before you take")
        times = None if times is None or self._times is None else self._times * whole("times", times, 1)
        return self._with(_times=times)

    def take(self, n: int) -> StreamDataset:
        """Return at most `n` samples over all ranks and workers, of each round where it is repeated afterwards.

        Each rank and worker gives the first ones of its own part: with tail="drop" equally many, so that n is rounded
        down to whole rounds of them.
        """
        n = whole("n", n, 0)
        name = "_each" if self._times == 1 else "_total"
        before = getattr(self, name)
        return self._with(**{name: n if before is None else min(n, before)})

    def _with(self, **changes: Any) -> StreamDataset:
        stream = type(self).__new__(type(self))
        stream.__dict__.update(self.__dict__, **changes)
        stream.set_epoch(self._epoch)
        return stream

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        workers, worker_id = (worker.num_workers, worker.id) if worker else (1, 0)
        if worker:
            _watch_owner(os.getpid())
        parts = self._topology.world_size * workers
        part = self._topology.rank * workers + worker_id
        if self._shards is not None and part == 0 and len(self._shards) < parts:
            _log.warning("a stream of %d shards for %d parts: some get none of them", len(self._shards), parts)
        first, self._at = self._at, _START
        self._given = first
        left = None if self._total is None else self._share(self._total, part, parts) - first.given
        for sample in itertools.islice(self._rounds(first, part, parts), left):
            yield sample if self._decode is None else self._decoded(sample)

    def _rounds(self, first: _Place, part: int, parts: int) -> Iterator[Any]:
        """Yield the samples of one part from `first` on, counted."""
        for number in itertools.count(first.round) if self._times is None else range(first.round, self._times):
            samples = self._part(part, parts, number)
            if self._most:
                key = (self._seed, self._epoch, part, parts, number)
                samples = self._shuffled(samples, np.random.default_rng(key if number else key[:4]))
            most = None if self._each is None else self._share(self._each, part, parts)
            skip = first.sample if number == first.round else 0
            count = 0
            for count, sample in enumerate(itertools.islice(samples, most), 1):
                if count > skip:
                    self._given = _Place(number, count, self._given.given + 1)
                    yield sample
            if not count:
                return  # nothing to repeat

    def _share(self, n: int, part: int, parts: int) -> int:
        return n // parts + (self._tail == "uneven" and part < n % parts)

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration that of `epoch`: another order, from the beginning."""
        self._epoch = whole("epoch", epoch, 0)
        self._given = self._at = _START

    def state_dict(self) -> dict[str, int]:
        """Return where the iteration of this process stands, for the same rank, world size and number of workers."""
        place = max(self._given, self._at)
        return {"seed": self._seed, "epoch": self._epoch, **place._asdict()}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Make the next iteration the rest of the one whose `state` it is. Raises `ResumeError` for another seed."""
        if set(state) != {"seed", "epoch", *_Place._fields} or state["seed"] != self._seed:
            raise ResumeError(f"{state!r} is no state of a stream with seed {self._seed}: give the stream it is from")
        self._epoch, self._given = state["epoch"], _START
        self._at = _Place(*(state[name] for name in _Place._fields))

    def _shuffled(self, samples: Iterator[Any], rng: np.random.Generator) -> Iterator[Any]:
        held: list[tuple[int, Any]] = []
        held_bytes = 0

        def drawn() -> Any:
            nonlocal held_bytes
            at = int(rng.integers(len(held)))
            held[at], held[-1] = held[-1], held[at]
            size, sample = held.pop()
            held_bytes -= size
            return sample

        for sample in samples:
            size = size_of(sample)
            while held and (len(held) >= self._most or held_bytes + size > self._most_bytes):
                yield drawn()
            held.append((size, sample))
            held_bytes += size
        while held:
            yield drawn()

    def _part(self, part: int, parts: int, number: int) -> Iterator[Any]:
        if self._shards is not None:
            order = list(range(len(self._shards)))
            if self._most:
                key = (self._seed, self._epoch, number)
                order = np.random.default_rng(key if number else key[:2]).permutation(len(order)).tolist()
            for shard in order[part::parts]:
                yield from self._read(self._shards[shard])
            return
        kept: Any = None
        count = 0
        for count, sample in enumerate(self._read(), 1):
            if (count - 1) % parts == part:
                kept = sample
                if self._tail == "uneven":
                    yield kept
            if self._tail == "drop" and count % parts == 0:
                yield kept  # the row is whole: every part has one
        if self._tail == "drop" and (left := count % parts):
            _log.info("left out the last %d of %d samples: no whole row of %d parts", left, count, parts)

    def _read(self, *shard: Any) -> Iterator[Any]:
        """Yield what the source gives; its errors name the shard."""
        count = 0
        try:
            for sample in self._source(*shard):
                yield sample
                count += 1
        except Exception as e:
            name = f"shard {shard[0]!r}" if shard else "the source"
            text = str(e) if isinstance(e, BucketfeedError) else f"{type(e).__name__}: {e}"
            kind = type(e) if isinstance(e, BucketfeedError) else ReadError
            raise kind(f"{name} of a stream failed after {count} samples: {text}") from e

    def _decoded(self, sample: Any) -> Any:
        assert self._decode is not None
        try:
            return self._decode(sample)
        except Exception as e:
            name = repr(sample["__key__"]) if isinstance(sample, dict) and "__key__" in sample else "of a stream"
            text = str(e) if isinstance(e, BucketfeedError) else f"{type(e).__name__}: {e}"
            raise DecodeError(f"decode failed for sample {name}: {text}") from e

    def __reduce__(self) -> tuple[Callable[[bytes], StreamDataset], tuple[bytes]]:
        return _unpickle, (cloudpickle.dumps(self.__dict__),)


@functools.cache
def _watch_owner(worker: int) -> None:
    """End this worker with the process that started it: in a source that blocks nothing else would tell it."""
    if (owner := multiprocessing.parent_process()) is not None:
        threading.Thread(target=end_with, args=(owner.pid,), daemon=True).start()


def size_of(sample: Any) -> int:
    """Return the bytes that a shuffle buffer counts for `sample`: those of arrays and tensors, of what containers hold.

    Of all other objects, and of the containers themselves, what `sys.getsizeof` says.
    """
    size = sys.getsizeof(sample)
    if isinstance(sample, dict):
        return size + sum(size_of(name) + size_of(value) for name, value in sample.items())
    if isinstance(sample, list | tuple):
        return size + sum(map(size_of, sample))
    return max(size, int(getattr(sample, "nbytes", 0)))


def _unpickle(state: bytes) -> StreamDataset:
    stream = StreamDataset.__new__(StreamDataset)
    stream.__dict__.update(cloudpickle.loads(state))
    return stream


class _FrontToBack:
    """A source: the samples of one object of a manifest, read from front to back with a few chunks in flight."""

    def __init__(self, manifest: Manifest, reader: RangeReader, format: Format) -> None:
        self._manifest = manifest
        self._reader = reader
        self._format = format

    def __call__(self, shard: int) -> Iterator[dict[str, Any]]:
        buffers = read_through(self._reader, self._manifest.range(shard), CHUNK_BYTES)
        return self._format.stream(buffers, self._manifest, shard)
