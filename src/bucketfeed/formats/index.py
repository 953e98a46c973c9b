"""Where each sample of a data set is: shard, start and length by number, in one mapped file."""

from __future__ import annotations

import bisect
import hashlib
import logging
import mmap
import os
import struct
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bucketfeed.cache.disk import DiskCache
from bucketfeed.cache.reader import CachedReader
from bucketfeed.errors import CacheError, ConfigError
from bucketfeed.formats.build import find_samples
from bucketfeed.formats.format import Format
from bucketfeed.formats.journal import Journal
from bucketfeed.formats.registry import format_of
from bucketfeed.store.manifest import Manifest
from bucketfeed.store.ranges import Buffer, Range, RangeReader

_log = logging.getLogger(__name__)

Ints = NDArray[np.int64]

# A sample is two words of 64 bits: start and length in the low 48, the shard's number in the two high 16.
_OFFSET_BITS = 48
_LOW = (1 << _OFFSET_BITS) - 1
_HEAD = struct.Struct("<16s32sQ8x")  # magic, fingerprint, samples
_MAGIC = b"bucketfeed idx 1"
_BLOCK_ROWS = 1 << 20  # rows worked on at a time, to keep temporaries small


class Index:
    """The samples of a manifest by number, in the order of shards and bytes; made by `build_index` or `open`.

    Costs a process no memory of its own and pickles as the paths of its files. Where every object is one sample, there
    is no file at all.

    Attributes:
        manifest: the objects.
        format: the name of how they hold samples, "raw", "tar", ...
        fingerprint: hex; equal where the same samples have the same numbers.
        path: the mapped file; None where there is none.
    """

    def __init__(self, manifest: Manifest, format: str | Format, path: Path | None = None) -> None:
        self.manifest = manifest
        self._format = format_of(format)
        self.format = self._format.name
        self.path = path
        self.fingerprint = _fingerprint(manifest, self._format)
        self._rows = None if path is None else _mapped(path, _version(manifest, self._format))
        self._length = len(manifest) if self._rows is None else len(self._rows)

    @classmethod
    def open(cls, path: str | os.PathLike[str], manifest: Manifest, format: str | Format = "tar") -> Index:
        """Return the index at `path`. Raises `CacheError` where it isn't that of `manifest` in this format."""
        return cls(manifest, format, Path(path))

    @classmethod
    def write(
        cls,
        path: str | os.PathLike[str],
        manifest: Manifest,
        format: str | Format,
        shards: Ints,
        starts: Ints,
        lengths: Ints,
    ) -> Index:
        """Publish the index of samples given by shard, start and length (bytes) at `path`, and return it."""
        path = Path(path)
        rows = np.empty((len(shards), 2), "<u8")
        for column, offsets, part in ((0, starts, shards & 0xFFFF), (1, lengths, shards >> 16)):
            rows[:, column] = offsets.astype(np.uint64) | part.astype(np.uint64) << np.uint64(_OFFSET_BITS)
        head = _HEAD.pack(_MAGIC, _version(manifest, format_of(format)).encode(), len(rows))
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.name, delete=False) as file:
                file.write(head)
                file.write(rows.data)
            os.replace(file.name, path)
        except OSError as e:
            raise CacheError(f"the index {path} can't be written: {e}; make room or choose another place") from e
        return cls(manifest, format, path)

    def __len__(self) -> int:
        return self._length

    def locate(self, samples: Ints) -> tuple[Ints, Ints, Ints]:
        """Return shard, start and length of each of `samples` (numbers from 0 on), in the order given."""
        if self._rows is None:
            shards = np.asarray(samples, np.int64)
            return shards, np.zeros_like(shards), self.manifest.sizes[shards].astype(np.int64)
        return _unpacked(self._rows[samples])

    def range(self, i: int) -> Range:
        """Return the range of sample `i`, of the version that was indexed."""
        shard, start, length = self._one(i)
        return self._format.range(self.manifest, shard, start, start + length)

    def ranges(self, samples: Ints) -> list[Range]:
        """Return the range of each of `samples`."""
        rows = zip(*(column.tolist() for column in self.locate(samples)), strict=True)
        return [self._format.range(self.manifest, shard, start, start + length) for shard, start, length in rows]

    def name(self, i: int) -> str | None:
        """Return the key of the object that is sample `i`; None where objects hold several samples."""
        return self.manifest.key(i) if self._rows is None else None

    def shards_of(self, samples: Ints) -> Ints:
        """Return the number of the object that each of `samples` lies in."""
        return self.locate(samples)[0]

    @property
    def classes(self) -> tuple[str, ...]:
        """No classes are known of objects alone."""
        return ()

    def find(self, shard: int, start: int) -> int:
        """Return the number of the first sample that starts at `start` of `shard` or behind it."""
        return bisect.bisect_left(range(len(self)), (shard, start), key=lambda i: self._one(i)[:2])

    def sample(self, i: int, buffer: Buffer) -> dict[str, Any]:
        """Return sample `i` made from its bytes: `"__key__"`, and bytes by field."""
        shard, start, _ = self._one(i)
        return self._format.sample(buffer, self.manifest, shard, start)

    def line(self, i: int, reader: RangeReader) -> int | None:
        """Return the line, from 1 on, that sample `i` begins in; reads its shard up to there. None without lines."""
        shard, start, _ = self._one(i)
        return self._format.line(self.manifest, shard, start, reader)

    def contents(self, buffers: Iterable[Buffer], url: str) -> Iterable[Buffer] | None:
        """Return what the shard at `url` holds whose bytes are `buffers`; None where that is these bytes."""
        return self._format.contents(buffers, url)

    @property
    def decodes(self) -> bool:
        """Whether ranges of some shards count bytes that must be decoded before."""
        return self._format.decodes(self.manifest)

    @property
    def batches(self) -> bool | str:
        """Whether `batch` makes many samples at once; as text, in which format the user wants no other."""
        return False

    def batch(self, samples: Ints, buffers: Sequence[Buffer]) -> Any:
        """Return many samples at once, made from their bytes, where `batches` is true."""
        raise NotImplementedError

    def chunks(self, chunk_bytes: int) -> Chunks:
        """Return the chunks that samples form when each shard is cut every `chunk_bytes`."""
        return Chunks(self, chunk_bytes)

    def _one(self, i: int) -> tuple[int, int, int]:
        if not 0 <= i < self._length:
            raise IndexError(f"sample {i} of an index of {self._length}")
        if self._rows is None:
            return i, 0, self.manifest.size(i)
        first, second = self._rows[i].tolist()
        return first >> _OFFSET_BITS | second >> _OFFSET_BITS << 16, first & _LOW, second & _LOW

    def __reduce__(self) -> tuple[Callable[..., Index], tuple[Manifest, Format, Path | None]]:
        return type(self), (self.manifest, self._format, self.path)

    def __repr__(self) -> str:
        return f"Index({self.manifest.url!r}, format={self.format!r}, samples={len(self):,})"


class Chunks:
    """Consecutive samples of one shard that are read together: those that start in the same cell of `chunk_bytes`.

    A raw object is a chunk of its own. Pickles as its index and size.

    Attributes:
        counts: samples in each chunk; or, as one int, how many chunks there are where each holds one sample.
        first: number of each chunk's first sample, and the number of samples at the end; None with an int.
    """

    def __init__(self, index: Index, chunk_bytes: int) -> None:
        if chunk_bytes < 1:
            raise ConfigError(f"chunk_bytes must be at least 1, not {chunk_bytes}")
        self.index = index
        self.chunk_bytes = chunk_bytes
        self.first: Ints | None = None
        self.counts: Ints | int = len(index)
        if index._rows is not None:
            self.first = _first_of_chunks(index._rows, chunk_bytes)
            self.counts = np.diff(self.first)

    def __len__(self) -> int:
        return len(self.index) if self.first is None else len(self.first) - 1

    def of(self, samples: Ints) -> Ints:
        """Return the chunk that each of `samples` lies in."""
        if self.first is None:
            return np.asarray(samples, np.int64)
        return np.searchsorted(self.first, samples, side="right") - 1

    def of_shard(self, shard: int) -> Iterable[int]:
        """Return the chunks of `shard`."""
        first, end = (self.index.find(which, 0) for which in (shard, shard + 1))
        if first == end:
            return ()
        chunks = self.of(np.array([first, end - 1])).tolist()
        return range(chunks[0], chunks[1] + 1)

    def range(self, c: int) -> Range:
        """Return the range of chunk `c`: from its first sample's start to its last sample's end."""
        shard, start, stop = self._span(c)
        return self.index._format.range(self.index.manifest, shard, start, stop)

    def size(self, c: int) -> int:
        """Return the bytes of chunk `c`."""
        _, start, stop = self._span(c)
        return stop - start

    @property
    def total_bytes(self) -> int:
        """The bytes of all chunks."""
        if self.first is None:
            return self.index.manifest.total_bytes
        starts, (_, last, lengths) = self.index.locate(self.first[:-1])[1], self.index.locate(self.first[1:] - 1)
        return int((last + lengths - starts).sum())

    def _span(self, c: int) -> tuple[int, int, int]:
        if not 0 <= c < len(self):
            raise IndexError(f"chunk {c} of {len(self)}")
        if self.first is None:
            return self.index._one(c)
        shard, start, _ = self.index._one(int(self.first[c]))
        _, last, length = self.index._one(int(self.first[c + 1]) - 1)
        return shard, start, last + length

    def __reduce__(self) -> tuple[type[Chunks], tuple[Index, int]]:
        return Chunks, (self.index, self.chunk_bytes)

    def __repr__(self) -> str:
        return f"Chunks({self.index!r}, chunk_bytes={self.chunk_bytes}, chunks={len(self):,})"


def sample_from(index: Index, i: int, buffer: Buffer) -> dict[str, Any]:
    """Return sample `i` of `index`, made from its bytes: `"__key__"`, and bytes by field. Raises `FormatError`."""
    return index.sample(i, buffer)


def build_index(
    manifest: Manifest,
    format: str | Format,
    reader: RangeReader,
    *,
    cache: DiskCache | None = None,
    folder: Path | None = None,
    path: Path | None = None,
    chunk_bytes: int = 4 << 20,
    progress: bool = True,
    executor: Executor | None = None,
) -> Index:
    """Return the index of `manifest`, from the file of an earlier run where there is one.

    Processes that ask for the same index at the same time build it once. An interrupted build goes on where it was.

    Args:
        manifest: the objects.
        format: "raw", "tar", ..., or a `Format`.
        reader: reads the objects; its cache, if it has one, is left out, since chunks are cached whole.
        cache: takes the chunks that come by, so that the first epoch need not fetch them again.
        folder: where the index is kept under the version of the objects; beside the manifest's file where None.
        path: keeps the index in exactly this file instead; an index of other data there is replaced.
        chunk_bytes: how the data set will be cut into chunks.
        progress: shows a bar on stderr when it takes longer than a second.
        executor: scans the shards, one a task, instead of threads of this process: a `ProcessPoolExecutor`,
            `dask.distributed.Client.get_executor()`, `bucketfeed.platforms.ray.RayExecutor`, or any other whose workers
            reach the objects. Chunks read there do not go into `cache`. It is left running.

    Raises `ConfigError` for an unknown format or a `path` that holds something else, `FormatError` for a shard that is
    not what it should be, `CacheError` where the index can't be written, and what the reader raises.
    """
    uncached = reader.inner if isinstance(reader, CachedReader) else reader
    known = format_of(format).opened(manifest, uncached)
    if (closed := known.closed(manifest, uncached, cache)) is not None:
        return closed
    if not known.indexed:
        return Index(manifest, known)
    kept = path or (folder or manifest.path.parent) / f"{_version(manifest, known)}.idx"
    if path is not None:
        _check_replaceable(path)
    if (found := _existing(kept, manifest, known)) is not None:
        return found
    with Journal(kept.with_name(kept.name + ".parts"), _version(manifest, known)) as journal:
        if (found := _existing(kept, manifest, known)) is None:  # unless one that held the journal has made it
            samples = find_samples(
                manifest,
                known,
                uncached,
                journal,
                cache=cache,
                chunk_bytes=chunk_bytes,
                progress=progress,
                executor=executor,
            )
            found = Index.write(kept, manifest, known, *samples)
        journal.remove()
    return found


def _existing(path: Path, manifest: Manifest, format: Format) -> Index | None:
    if not path.exists():
        return None
    try:
        return Index.open(path, manifest, format)
    except CacheError as e:
        _log.info("building the index anew: %s", e)
        return None


def _check_replaceable(path: Path) -> None:
    """Raise where `path` holds something that is no index."""
    try:
        with open(path, "rb") as file:
            start = file.read(len(_MAGIC))
    except FileNotFoundError:
        return
    except OSError as e:
        raise ConfigError(f"index={str(path)!r} can't be read: {e}; give the path of a file") from e
    if start and start != _MAGIC:
        raise ConfigError(f"index={str(path)!r} is no index, it starts with {start!r}; give another path")


def _mapped(path: Path, fingerprint: str) -> NDArray[np.uint64]:
    again = "remove it and open the data set again"
    try:
        with open(path, "rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    except (OSError, ValueError) as e:
        raise CacheError(f"the index {path} can't be opened: {e}; open the data set again") from e
    if len(mapped) < _HEAD.size or mapped[: len(_MAGIC)] != _MAGIC:
        raise CacheError(f"{path} is no index of this version; {again}")
    _, written, samples = _HEAD.unpack_from(mapped)
    if written.decode(errors="replace") != fingerprint:
        raise CacheError(f"the index {path} is of other data: {written!r} instead of {fingerprint!r}; {again}")
    if len(mapped) != _HEAD.size + 16 * samples:
        raise CacheError(f"the index {path} has {len(mapped)} bytes, not those of {samples} samples; {again}")
    return np.frombuffer(mapped, "<u8", 2 * samples, _HEAD.size).reshape(-1, 2)


def _fingerprint(manifest: Manifest, format: Format) -> str:
    """Return the name of the samples: a copy of a folder has the same."""
    return _named(manifest.fingerprint, format)


def _version(manifest: Manifest, format: Format) -> str:
    """Return the name of the bytes that were indexed: a file written anew has another one, be it of the same size."""
    return _named(manifest.version, format)


def _named(data: str, format: Format) -> str:
    text = f"{data} {format.name} {format.version}{format.numbering}"
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _unpacked(rows: NDArray[np.uint64]) -> tuple[Ints, Ints, Ints]:
    words = rows.view(np.int64)
    high = words >> _OFFSET_BITS & 0xFFFF
    low = words & _LOW
    return high[:, 0] | high[:, 1] << 16, low[:, 0], low[:, 1]


def _first_of_chunks(rows: NDArray[np.uint64], chunk_bytes: int) -> Ints:
    """Return the first sample of each chunk, and the number of samples."""
    firsts = []
    before = (-1, -1)  # shard and cell of the sample before
    for at in range(0, len(rows), _BLOCK_ROWS):
        shards, starts, _ = _unpacked(rows[at : at + _BLOCK_ROWS])
        cells = starts // chunk_bytes
        new = np.empty(len(shards), bool)
        new[0] = (shards[0], cells[0]) != before
        new[1:] = (shards[1:] != shards[:-1]) | (cells[1:] != cells[:-1])
        firsts.append(np.flatnonzero(new) + at)
        before = (shards[-1], cells[-1])
    return np.concatenate([*firsts, [len(rows)]]).astype(np.int64)
