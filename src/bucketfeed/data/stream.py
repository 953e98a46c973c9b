"""Samples from a source without an index: generator functions, and tars read from front to back."""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Literal

import cloudpickle
import numpy as np
from torch.utils.data import IterableDataset, get_worker_info

from bucketfeed.data.dataset import CHUNK_BYTES, Decode
from bucketfeed.errors import BucketfeedError, ConfigError, DecodeError, ReadError, ResumeError
from bucketfeed.formats.tar import iter_tar
from bucketfeed.sampling.topology import Topology
from bucketfeed.store.manifest import Manifest
from bucketfeed.store.ranges import Buffer, RangeReader
from bucketfeed.store.readers import open_reader
from bucketfeed.store.sizes import parse_size
from bucketfeed.store.whole import whole

_log = logging.getLogger(__name__)
_READ_AHEAD = 4  # chunks of a shard in flight while it is read from front to back

Source = Callable[..., Iterable[Any]]


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
        self._epoch = self._given = self._skip = 0
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
        manifest = Manifest.from_url(url, storage_options=storage_options)
        tars = [i for i in range(len(manifest)) if manifest.object_url(i).endswith(".tar")]
        if not tars:
            raise ConfigError(f"no .tar among the {len(manifest)} objects of {manifest.url}; nothing to stream")
        return cls(_Tars(manifest, open_reader(url, storage_options)), shards=tars, **options)

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        workers, worker_id = (worker.num_workers, worker.id) if worker else (1, 0)
        parts = self._topology.world_size * workers
        part = self._topology.rank * workers + worker_id
        samples = self._part(part, parts)
        if self._most:
            samples = self._shuffled(samples, np.random.default_rng((self._seed, self._epoch, part, parts)))
        skip, self._skip, self._given = self._skip, 0, 0
        for sample in samples:
            self._given += 1
            if self._given > skip:
                yield sample if self._decode is None else self._decoded(sample)

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration that of `epoch`: another order, from the beginning."""
        self._epoch, self._given, self._skip = whole("epoch", epoch, 0), 0, 0

    def state_dict(self) -> dict[str, int]:
        """Return where the iteration of this process stands, for the same rank, world size and number of workers."""
        return {"seed": self._seed, "epoch": self._epoch, "given": max(self._given, self._skip)}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Make the next iteration the rest of the one whose `state` it is. Raises `ResumeError` for another seed."""
        if set(state) != {"seed", "epoch", "given"} or state["seed"] != self._seed:
            raise ResumeError(f"{state!r} is no state of a stream with seed {self._seed}: give the stream it is from")
        self._epoch, self._given, self._skip = state["epoch"], 0, state["given"]

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

    def _part(self, part: int, parts: int) -> Iterator[Any]:
        if self._shards is not None:
            order = list(range(len(self._shards)))
            if self._most:
                order = np.random.default_rng((self._seed, self._epoch)).permutation(len(order)).tolist()
            for number in order[part::parts]:
                yield from self._read(self._shards[number])
            return
        kept: Any = None
        number = -1
        for number, sample in enumerate(self._read()):
            if number % parts == part:
                kept = sample
                if self._tail == "uneven":
                    yield kept
            if self._tail == "drop" and number % parts == parts - 1:
                yield kept  # the round is whole: every part has one
        if self._tail == "drop" and (left := (number + 1) % parts):
            _log.info("left out the last %d of %d samples: no whole round of %d parts", left, number + 1, parts)

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


class _Tars:
    """A source: the samples of one tar of a manifest, read from front to back with a few chunks in flight."""

    def __init__(self, manifest: Manifest, reader: RangeReader) -> None:
        self._manifest = manifest
        self._reader = reader

    def __call__(self, shard: int) -> Iterator[dict[str, Any]]:
        return iter_tar(self._buffers(shard), self._manifest.object_url(shard))

    def _buffers(self, shard: int) -> Iterator[Buffer]:
        size = self._manifest.size(shard)
        ranges = [
            self._manifest.range(shard, start, min(start + CHUNK_BYTES, size)) for start in range(0, size, CHUNK_BYTES)
        ]
        ahead: deque[Future[list[Buffer]]] = deque()
        with ThreadPoolExecutor(_READ_AHEAD, thread_name_prefix="bucketfeed-stream") as pool:
            for range_ in ranges:
                ahead.append(pool.submit(self._reader.read, [range_]))
                if len(ahead) >= _READ_AHEAD:
                    yield ahead.popleft().result()[0]
            while ahead:
                yield ahead.popleft().result()[0]
