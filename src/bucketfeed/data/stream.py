"""Samples from a source without an index: generator functions, and tars read from front to back."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Literal

import cloudpickle
from torch.utils.data import IterableDataset, get_worker_info

from bucketfeed.data.dataset import CHUNK_BYTES, Decode
from bucketfeed.errors import BucketfeedError, ConfigError, DecodeError
from bucketfeed.formats.tar import iter_tar
from bucketfeed.sampling.topology import Topology
from bucketfeed.store.manifest import Manifest
from bucketfeed.store.ranges import Buffer, RangeReader
from bucketfeed.store.readers import open_reader

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
    """

    def __init__(
        self,
        source: Source,
        *,
        shards: Sequence[Any] | None = None,
        decode: Decode | None = None,
        tail: Literal["uneven", "drop"] = "uneven",
        topology: Topology | None = None,
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
        for sample in self._part(part, parts):
            yield sample if self._decode is None else self._decoded(sample)

    def _part(self, part: int, parts: int) -> Iterator[Any]:
        if self._shards is not None:
            for number in range(part, len(self._shards), parts):
                yield from self._source(self._shards[number])
            return
        kept: Any = None
        number = -1
        for number, sample in enumerate(self._source()):
            if number % parts == part:
                kept = sample
                if self._tail == "uneven":
                    yield kept
            if self._tail == "drop" and number % parts == parts - 1:
                yield kept  # the round is whole: every part has one
        if self._tail == "drop" and (left := (number + 1) % parts):
            _log.info("left out the last %d of %d samples: no whole round of %d parts", left, number + 1, parts)

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
