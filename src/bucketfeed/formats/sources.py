"""What the rows of an array are read from, whatever file they lie in."""

from __future__ import annotations

import io
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from bucketfeed.store.manifest import Manifest
from bucketfeed.store.process import PerProcess
from bucketfeed.store.ranges import Buffer, RangeReader

T = TypeVar("T")

_MOST_OPEN = 64  # files of other libraries that a process keeps open
_BUFFER_BYTES = 64 << 10
_COLUMNS_AT_ONCE = 128  # of an array in Fortran order: bounds what is held twice


class Files:
    """The objects of a manifest for sources: bytes by range, and open files that never leave their process.

    Args:
        manifest: the objects.
        reader: reads exactly what is asked for.
        kept: reads through the cache, for what is asked for in small pieces; `reader` where nothing is kept.
    """

    def __init__(self, manifest: Manifest, reader: RangeReader, kept: RangeReader | None = None) -> None:
        self.manifest = manifest
        self.reader = reader
        self.kept = kept or reader
        self._handles: PerProcess[OrderedDict[Any, Any]] = PerProcess(OrderedDict)

    def read(self, number: int, spans: Sequence[tuple[int, int]], *, kept: bool = False) -> list[Buffer]:
        """Return bytes start to stop of an object for each of `spans`."""
        reader = self.kept if kept else self.reader
        return reader.read([self.manifest.range(number, start, stop) for start, stop in spans])

    def file(self, number: int) -> io.BufferedReader:
        """Return an object as a file open for reading."""
        return io.BufferedReader(ObjectFile(self, number), _BUFFER_BYTES)

    def handle(self, key: Any, open: Callable[[], T]) -> T:
        """Return what `open` gave when it was first asked for `key` in this process."""
        handles = self._handles.get()
        if key not in handles:
            handles.setdefault(key, open())
            while len(handles) > _MOST_OPEN:
                handles.popitem(last=False)
        found: T = handles[key]
        return found

    def __reduce__(self) -> tuple[type[Files], tuple[Any, ...]]:
        return Files, (self.manifest, self.reader, self.kept)


class ObjectFile(io.RawIOBase):
    """An object as a raw file, read through the cache."""

    def __init__(self, files: Files, number: int) -> None:
        super().__init__()
        self._files = files
        self._number = number
        self._size = files.manifest.size(number)
        self._at = 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return where the next read starts."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to `offset` from the start, the place reached, or the end; return where that is."""
        self._at = max(0, offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence])
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Fill `buffer` from here on; return how many bytes there were."""
        view = memoryview(buffer).cast("B")
        stop = min(self._size, self._at + len(view))
        if stop <= self._at:
            return 0
        data = self._files.read(self._number, [(self._at, stop)], kept=True)[0]
        view[: len(data)] = data
        self._at = stop
        return len(data)


@dataclass(frozen=True)
class Source:
    """An array in one of the objects, or in several: its shape and dtype, and how to get rows of it.

    Attributes:
        number: of the object in the manifest.
        step: rows that are stored together.
    """

    number: int
    shape: tuple[int, ...]
    dtype: np.dtype
    step = 1
    sequential = False  # whether it can only be read from front to back

    @property
    def direct(self) -> int | None:
        """The byte of the object where rows begin to lie one behind the other; None where they do not."""
        return None

    def rows(self, files: Files, start: int, stop: int) -> np.ndarray:
        """Return rows `start` to `stop`."""
        raise NotImplementedError

    def blocks(self, files: Files, rows: int) -> Iterator[np.ndarray]:
        """Yield all rows from front to back, so many at a time."""
        for start in range(0, self.shape[0], rows):
            yield self.rows(files, start, min(start + rows, self.shape[0]))


@dataclass(frozen=True)
class Plain(Source):
    """An array that lies in its object as numpy would lay it out in memory.

    Attributes:
        offset: of its first byte.
        fortran: whether the first axis changes fastest, so that a row lies scattered.
    """

    offset: int = 0
    fortran: bool = False

    @property
    def direct(self) -> int | None:
        """Where rows begin; None in Fortran order."""
        return None if self.fortran else self.offset

    def rows(self, files: Files, start: int, stop: int) -> np.ndarray:
        """Return rows `start` to `stop`: one range, or in Fortran order one for each column."""
        rest, item = self.shape[1:], self.dtype.itemsize
        if self.fortran:
            firsts = [self.offset + item * self.shape[0] * column for column in range(math.prod(rest))]
            columns = np.empty((len(firsts), stop - start), self.dtype)
            for first in range(0, len(firsts), _COLUMNS_AT_ONCE):
                spans = [(at + item * start, at + item * stop) for at in firsts[first : first + _COLUMNS_AT_ONCE]]
                for number, part in enumerate(files.read(self.number, spans, kept=True), first):
                    columns[number] = np.frombuffer(part, self.dtype)
            return columns.reshape(*rest[::-1], stop - start).T
        row = item * math.prod(rest)
        body = files.read(self.number, [(self.offset + row * start, self.offset + row * stop)])[0]
        return np.frombuffer(body, self.dtype).reshape(stop - start, *rest)
