"""Samples into shards: one after the other from any source, or each part of a data set by whichever worker takes it."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import xxhash

from bucketfeed.cache.reader import CachedReader
from bucketfeed.data.dataset import MapDataset
from bucketfeed.errors import ConfigError
from bucketfeed.formats.beside import Placed
from bucketfeed.formats.format import Ints
from bucketfeed.formats.members import END, Members, members
from bucketfeed.store.ranges import Buffer, Range
from bucketfeed.store.uploads import Upload
from bucketfeed.store.writing import Writer

Keys: TypeAlias = Literal["own", "number"]
_BATCH = 256  # samples read at once, and no more bytes than:
_BATCH_BYTES = 32 << 20


class Shard(NamedTuple):
    """A shard that is complete, and where its samples are in it, if this run has written it."""

    name: str
    size: int
    samples: int
    digest: str
    starts: Ints | None = None
    lengths: Ints | None = None

    @property
    def where(self) -> Placed:
        """What an index says of it."""
        return self.name, self.size, self.starts, self.lengths


def write_all(
    samples: Iterable[Members],
    names: Iterator[str],
    max_bytes: int,
    open: Callable[[str], AbstractContextManager[Upload]],
) -> Iterator[Shard]:
    """Write samples in their order into shards of at most `max_bytes`, or of one sample; yield each once it is visible.

    Raises `ConfigError` for a key that comes twice in a shard.
    """
    source = iter(samples)
    sample = next(source, None)
    while sample is not None:
        name, digest = next(names), xxhash.xxh3_128()
        starts: list[int] = []
        lengths: list[int] = []
        seen: set[str] = set()
        size = 0
        with open(name) as upload:
            while sample is not None and (not seen or size + sample.size + len(END) <= max_bytes):
                if sample.key in seen:
                    raise ConfigError(
                        f"{name}: the key {sample.key!r} comes twice; give the samples different keys, or pass "
                        "keys='number' (--number-keys)"
                    )
                seen.add(sample.key)
                for part in sample.parts:
                    digest.update(part)
                    upload.write(part)
                starts.append(size)
                lengths.append(sample.length)
                size += sample.size
                sample = next(source, None)
            upload.write(END)
        where = np.array(starts, np.int64), np.array(lengths, np.int64)
        yield Shard(name, size + len(END), len(starts), digest.hexdigest(), *where)


def numbered(samples: Iterable[Mapping[str, Any]], keys: Keys, first: int = 0) -> Iterator[Members]:
    """Yield samples as members of a tar; with keys "number" each is called by its place, from `first` on."""
    for number, sample in enumerate(samples, first):
        if not isinstance(sample, Mapping):
            raise ConfigError(f"sample {number} is {type(sample).__name__}, not a dict of '__key__' and fields")
        yield members({**sample, "__key__": f"{number:012}"} if keys == "number" else sample)


class Part(NamedTuple):
    """What one task writes: some samples of the data set, into a shard, or more where they turn out larger."""

    number: int
    digits: int  # of its number in names
    samples: Sequence[int]
    first: int  # place of its first sample in all that are written

    def names(self) -> Iterator[str]:
        """Yield the names of its shards; they sort between those of the parts around it."""
        stem = f"shard-{self.number:0{self.digits}}"
        return itertools.chain([f"{stem}.tar"], (f"{stem}_{more:03}.tar" for more in itertools.count(1)))


class Stopped(Exception):
    """Another part has failed, or the run is interrupted."""


def _nothing(_: int) -> None:
    pass


@dataclass
class Packing:
    """Writes one part; called from many threads, or sent to where an executor's workers are.

    Args:
        dataset: what is read.
        writer: where shards go.
        max_bytes: of a shard.
        keys: "own", or "number".
    """

    dataset: MapDataset
    writer: Writer
    max_bytes: int
    keys: Keys
    advance: Callable[[int], None] = _nothing
    stopped: bool = False

    def __call__(self, part: Part) -> list[Shard]:
        """Return the shards that `part` became."""
        samples = numbered(self.samples(part.samples), self.keys, part.first)
        return list(write_all(self._told(samples), part.names(), self.max_bytes, self.writer.open))

    def _told(self, samples: Iterable[Members]) -> Iterator[Members]:
        for sample in samples:
            if self.stopped:
                raise Stopped
            self.advance(sample.size)
            yield sample

    def samples(self, numbers: Sequence[int]) -> Iterator[dict[str, Any]]:
        """Yield samples as dicts of fields that can be written; the next batch is read meanwhile."""
        found = self._found(numbers)
        return _paired(found) if self.paired else found

    @property
    def paired(self) -> bool:
        """Whether neighbours of one key are one sample: objects `a.jpg` and `a.json`."""
        return self.dataset.index.format == "raw" and self.dataset.decode is None

    def _found(self, numbers: Sequence[int]) -> Iterator[dict[str, Any]]:
        dataset = self.dataset
        with ThreadPoolExecutor(1, thread_name_prefix="bucketfeed-pack") as pool:
            batches = self._batches(numbers)
            reading = pool.submit(self._read, next(batches, ([], [])))
            while (read := reading.result())[0]:
                reading = pool.submit(self._read, next(batches, ([], [])))
                samples, failures = dataset.build(*read)
                dataset._skips.add(failures)
                failed = {failure.sample for failure in failures}
                whole = (buffer for item, buffer in zip(*read, strict=True) if item not in failed)
                for sample, buffer in zip(samples, whole, strict=True):
                    yield sample if dataset.decode is not None else _writable(sample, dataset.index.format, buffer)

    def _batches(self, numbers: Sequence[int]) -> Iterator[tuple[list[int], list[Range]]]:
        for at in range(0, len(numbers), _BATCH):
            items = np.asarray(numbers[at : at + _BATCH], np.int64)
            batch: tuple[list[int], list[Range]] = [], []
            size = 0
            for item, where in zip(items.tolist(), self.dataset.index.ranges(items), strict=True):
                if batch[0] and size + where.length > _BATCH_BYTES:
                    yield batch
                    batch, size = ([], []), 0
                batch[0].append(item)
                batch[1].append(where)
                size += where.length
            yield batch

    def _read(self, batch: tuple[list[int], list[Range]]) -> tuple[list[int], list[Buffer]]:
        items, ranges = batch
        reader = self.dataset.reader
        if type(reader) is not CachedReader or not items:
            return items, reader.read(ranges)
        chunks = self.dataset.chunks()  # what is read once is not kept, and what is there is used
        within = [chunks.range(chunk) for chunk in chunks.of(np.array(items)).tolist()]
        return items, reader.peek(ranges, within)

    def elsewhere(self) -> Elsewhere:
        """Return this for another process, which makes clients of its own."""
        return Elsewhere(pickle.dumps(replace(self, advance=_nothing)))


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """A `Packing` for any process that reaches the files of the data set's index."""

    pickled: bytes

    def __call__(self, part: Part) -> list[Shard]:
        """Return the shards that `part` became."""
        packing: Packing = pickle.loads(self.pickled)
        return packing(part)


def dotless(key: str) -> str:
    """Return `key` with no dot in its last part, where tars have the field begin."""
    folder, slash, name = key.rpartition("/")
    return f"{folder}{slash}{name.replace('.', '_')}"


def _writable(sample: dict[str, Any], format: str, buffer: Buffer) -> dict[str, Any]:
    """Return a sample as its format made it with names and values that a tar can have; a row is one field `json`."""
    key, fields = dotless(sample["__key__"]), {name: value for name, value in sample.items() if name != "__key__"}
    if format == "jsonl":
        fields = {"json": bytes(buffer).removesuffix(b"\r")}  # the line as it is
    elif format == "arrays":
        fields = {f"{name}.npy": value for name, value in fields.items()}
    elif format not in ("raw", "tar", "text"):
        fields = {"json": fields}
    return {"__key__": key, **fields}


def _paired(samples: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for key, group in itertools.groupby(samples, lambda sample: sample["__key__"]):
        paired: dict[str, Any] = {}
        for sample in group:
            if twice := paired.keys() & sample.keys() - {"__key__"}:
                raise ConfigError(f"sample {key!r} has field {min(twice)!r} twice; rename one of the two objects")
            paired |= sample
        yield paired
