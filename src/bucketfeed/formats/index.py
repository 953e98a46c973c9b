"""Where each sample of a data set is: shard, start and length by number, in one mapped file."""

from __future__ import annotations

import bisect
import functools
import logging
import os
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bucketfeed.cache.disk import DiskCache
from bucketfeed.cache.reader import CachedReader
from bucketfeed.errors import AccessError, CacheError, ConfigError
from bucketfeed.formats.build import find_samples
from bucketfeed.formats.changes import Changes, take_unchanged
from bucketfeed.formats.chunks import Chunks as Chunks
from bucketfeed.formats.detect import detect
from bucketfeed.formats.format import Format
from bucketfeed.formats.index_files import (
    HEAD_BYTES,
    LOW,
    OFFSET_BITS,
    IndexFile,
    Rows,
    check_replaceable,
    fingerprint_of,
    unpacked,
    version_of,
    write_index,
)
from bucketfeed.formats.index_urls import Place
from bucketfeed.formats.journal import Journal
from bucketfeed.formats.registry import format_of
from bucketfeed.formats.samples import Bodies
from bucketfeed.store.manifest import Manifest, clean_up
from bucketfeed.store.ranges import Buffer, Range, RangeReader
from bucketfeed.store.readers import open_reader
from bucketfeed.store.urls import parse_url

_log = logging.getLogger(__name__)

Ints = NDArray[np.int64]

# A range made of its parts, several times quicker than by its own constructor: there is one a sample.
_new_range: Callable[[Any], Range] = functools.partial(tuple.__new__, Range)


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
        self.fingerprint = fingerprint_of(manifest, self._format)
        self._rows = None if path is None else _rows(path, manifest, self._format)
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
        write_index(Path(path), manifest, format_of(format), [(shards, starts, lengths)], len(starts))
        return cls(manifest, format, Path(path))

    def save(self, url: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None) -> None:
        """Put this index, with its manifest, at any URL, whole or not at all; `load` brings it back anywhere.

        Raises `ConfigError` for one that headers alone tell (arrays), `AccessError`, and `WriteError` where it fails.
        """
        if self.path is not None:
            Place(os.fspath(url), storage_options).put(self.path)
            return
        if type(self) is not Index:
            raise ConfigError(f"the index of {self.manifest.url} lies in no file: opening it reads headers only")
        with tempfile.TemporaryDirectory(prefix="bucketfeed-") as folder:
            write_index(path := Path(folder) / "index", self.manifest, self._format, [], 0)
            Place(os.fspath(url), storage_options).put(path)

    @classmethod
    def load(
        cls,
        url: str | os.PathLike[str],
        *,
        storage_options: Mapping[str, Any] | None = None,
        folder: str | os.PathLike[str] | None = None,
        format: Format | None = None,
    ) -> Index:
        """Return the index at `url`, of the objects as they were then: a read of one that has changed since is refused.

        `folder` is where its files are kept; a temporary one, removed with this process, where None. `format` is needed
        where it was indexed by a format of your own. Raises `CacheError`, `ConfigError`, and what reading raises.
        """
        place = Place(os.fspath(url), storage_options)
        version = place.version()
        where = Path(folder or tempfile.mkdtemp(prefix="bucketfeed-"))
        path = where / f"{version}.idx"
        if version is None or not path.exists():
            place.fetch(path)
        file = IndexFile.open(path)
        manifest = Manifest.from_data(file.manifest_data, where)
        known = format or file.format(format_of)
        index = cls(manifest, known, path if known.indexed else None)
        if folder is None:
            weakref.finalize(index, clean_up, str(where), os.getpid())
        return index

    def changes(self, *, storage_options: Mapping[str, Any] | None = None) -> Changes:
        """List the objects again and return how they differ from those that were indexed; falsy where none does."""
        with tempfile.TemporaryDirectory(prefix="bucketfeed-") as folder:
            now = Manifest.from_url(self.manifest.url, storage_options=storage_options, folder=folder)
        return Changes.between(self.manifest, now)

    def __len__(self) -> int:
        return self._length

    def locate(self, samples: Ints) -> tuple[Ints, Ints, Ints]:
        """Return shard, start and length of each of `samples` (numbers from 0 on), in the order given."""
        if self._rows is None:
            shards = np.asarray(samples, np.int64)
            return shards, np.zeros_like(shards), self.manifest.sizes[shards].astype(np.int64)
        return unpacked(self._rows[samples])

    def range(self, i: int) -> Range:
        """Return the range of sample `i`, of the version that was indexed."""
        return self.span(*self._one(i))

    def ranges(self, samples: Ints) -> list[Range]:
        """Return the range of each of `samples`."""
        shards, starts, lengths = self.locate(samples)
        spans = {shard: self.span(shard, 0, 0) for shard in np.unique(shards).tolist()}
        objects = [spans[shard] for shard in shards.tolist()]
        urls, etags = [span.url for span in objects], [span.etag for span in objects]
        return list(map(_new_range, zip(urls, starts.tolist(), (starts + lengths).tolist(), etags, strict=True)))

    def span(self, shard: int, start: int, length: int) -> Range:
        """Return a range of `length` bytes of a shard."""
        return self._format.range(self.manifest, shard, start, start + length)

    def name(self, i: int) -> str | None:
        """Return the key of the object that is sample `i`; None where objects hold several samples."""
        return self.manifest.key(i) if self._rows is None else None

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

    def batch(self, samples: Ints, bodies: Bodies) -> Any:
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
        return first >> OFFSET_BITS | second >> OFFSET_BITS << 16, first & LOW, second & LOW

    def __reduce__(self) -> tuple[Callable[..., Index], tuple[Manifest, Format, Path | None]]:
        return type(self), (self.manifest, self._format, self.path)

    def __repr__(self) -> str:
        return f"Index({self.manifest.url!r}, format={self.format!r}, samples={len(self):,})"


def sample_from(index: Index, i: int, buffer: Buffer) -> dict[str, Any]:
    """Return sample `i` of `index`, made from its bytes: `"__key__"`, and bytes by field. Raises `FormatError`."""
    return index.sample(i, buffer)


def build_index(
    manifest: Manifest | str | os.PathLike[str],
    format: str | Format = "auto",
    reader: RangeReader | None = None,
    *,
    cache: DiskCache | None = None,
    folder: Path | None = None,
    path: str | os.PathLike[str] | None = None,
    chunk_bytes: int = 4 << 20,
    progress: bool = True,
    executor: Executor | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Index:
    """Return the index of `manifest`, from the file of an earlier run where there is one.

    Processes that ask for the same index at the same time build it once. An interrupted build goes on where it was.
    Shards that are the same in an earlier index, at `path` or in `folder`, are not scanned again.

    Args:
        manifest: the objects, or the URL they are under.
        format: "raw", "tar", ..., or a `Format`; "auto" tells it by the names of the objects.
        reader: reads the objects; its cache, if it has one, is left out, since chunks are cached whole.
        cache: takes the chunks that come by, so that the first epoch need not fetch them again.
        folder: where the index is kept under the version of the objects; beside the manifest's file where None.
        path: keeps the index in exactly this file instead, or at this URL of any store as well; an index of other data
            there is replaced.
        chunk_bytes: how the data set will be cut into chunks.
        progress: shows a bar on stderr when it takes longer than a second.
        executor: scans the shards, one a task, instead of threads of this process: a `ProcessPoolExecutor`,
            `dask.distributed.Client.get_executor()`, `bucketfeed.platforms.ray.RayExecutor`, or any other whose workers
            reach the objects. Chunks read there do not go into `cache`. It is left running.
        storage_options: of the objects, where they are given by URL, and of `path` in a store of the same kind.

    Raises `ConfigError` for an unknown format or a `path` that holds something else, `FormatError` for a shard that is
    not what it should be, `CacheError` where the index can't be written, and what the reader raises. Where it may not
    be put at a URL, a warning says so.
    """
    if not isinstance(manifest, Manifest):
        manifest = Manifest.from_url(manifest, storage_options=storage_options, folder=folder, progress=progress)
    reader = reader or open_reader(manifest.url, storage_options)
    uncached = reader.inner if isinstance(reader, CachedReader) else reader
    known = format_of(detect(manifest) if format == "auto" else format).opened(manifest, uncached)
    if (closed := known.closed(manifest, uncached, cache)) is not None:
        return closed
    if not known.indexed:
        return Index(manifest, known)
    version = version_of(manifest, known)
    kept = (folder or manifest.path.parent) / f"{version}.idx"
    place = _place(path, manifest, storage_options)
    if path is not None and place is None:
        kept = Path(parse_url(path).key)
        check_replaceable(_start(kept), str(path))
    stored = None if place is None else place.version()
    if (place is None or stored == version) and (found := _existing(kept, manifest, known)) is not None:
        return found
    with Journal(kept.with_name(kept.name + ".parts"), version) as journal:
        found = _existing(kept, manifest, known)  # where one that held the journal has made it
        if found is None and place is not None and stored == version:
            place.fetch(kept)
            found = _existing(kept, manifest, known)
        if found is None:
            earlier = _earlier(kept, place if stored else None, alone=place is None and path is not None)
            level = logging.INFO if path is None else logging.WARNING
            if (changes := take_unchanged(journal, manifest, known, earlier)) is not None:
                _log.log(level, "since %s was indexed: %s", manifest.url, changes)
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
            write_index(kept, manifest, known, samples, sum(len(starts) for _, starts, _ in samples))
            found = Index.open(kept, manifest, known)
            stored = None
        if place is not None and stored != version and place.version() != version:
            _put(place, kept)
        journal.remove()
    return found


def _place(
    path: str | os.PathLike[str] | None, manifest: Manifest, storage_options: Mapping[str, Any] | None
) -> Place | None:
    """Return where an index is kept besides the file; None where no URL of another store is given."""
    if path is None or (url := parse_url(path)).scheme == "file":
        return None
    return Place(str(url), storage_options if url.scheme == parse_url(manifest.url).scheme else None)


def _put(place: Place, kept: Path) -> None:
    try:
        place.put(kept)
    except AccessError as e:
        _log.warning("the index is not kept at its URL, only in %s: %s", kept, e)


def _earlier(kept: Path, place: Place | None, *, alone: bool) -> Iterator[Path]:
    """Yield the files of earlier indexes, the likeliest first; those around `kept` unless it stands `alone`."""
    if kept.exists():
        yield kept
    if place is not None:
        fetched = kept.with_name(kept.name + ".earlier")
        try:
            place.fetch(fetched)
            yield fetched
        finally:
            fetched.unlink(missing_ok=True)
    if not alone:
        yield from sorted(kept.parent.glob("*.idx"), key=lambda path: path.stat().st_mtime_ns, reverse=True)


def _existing(path: Path, manifest: Manifest, format: Format) -> Index | None:
    if not path.exists():
        return None
    try:
        return Index.open(path, manifest, format)
    except CacheError as e:
        _log.info("building the index anew: %s", e)
        return None


def _start(path: Path) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(HEAD_BYTES)
    except FileNotFoundError:
        return b""
    except OSError as e:
        raise ConfigError(f"index={str(path)!r} can't be read: {e}; give the path of a file") from e


def _rows(path: Path, manifest: Manifest, format: Format) -> Rows:
    file, version = IndexFile.open(path), version_of(manifest, format)
    if file.version != version:
        raise CacheError(
            f"the index {path} is of other data: {file.version!r} instead of {version!r}; remove it and open the data "
            "set again"
        )
    return file.rows
