"""Bytes of one object from front to back, held only as long as they are needed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from bucketfeed.store.ranges import Buffer

_PROBE_BYTES = 64 << 10  # what the first read after a hop takes: some headers, should the next members be small


class Source(Protocol):
    """What a format reads an object through; offsets count from the source's first byte."""

    def view(self, start: int, stop: int) -> Buffer:
        """Return the bytes from `start` to `stop`, fewer only where the source ends before `stop`."""
        ...

    def reaches(self, stop: int) -> bool:
        """Tell whether the source has at least `stop` bytes."""
        ...


class Whole:
    """A source that lies in memory as one buffer."""

    __slots__ = ("_buffer", "_length")

    def __init__(self, buffer: Buffer) -> None:
        self._buffer = buffer
        self._length = len(buffer)

    def view(self, start: int, stop: int) -> Buffer:
        """Return the bytes from `start` to `stop`, clipped to the buffer."""
        return self._buffer[start:stop]

    def reaches(self, stop: int) -> bool:
        """Tell whether the buffer has at least `stop` bytes."""
        return stop <= self._length


class Window(ABC):
    """The part of an object that is in memory: grows at its end as views ask, shrinks at its front when released."""

    def __init__(self) -> None:
        self._parts: deque[tuple[int, Buffer]] = deque()
        self._stop = 0  # where the held bytes end

    def view(self, start: int, stop: int) -> Buffer:
        """Return the bytes from `start` (not released yet) to `stop`, clipped where the object ends."""
        while self._stop < stop and self._grow(start):
            pass
        pieces = [
            part[max(start - at, 0) : stop - at] for at, part in self._parts if at < stop and at + len(part) > start
        ]
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def reaches(self, stop: int) -> bool:
        """Tell whether the object has at least `stop` bytes; without a known size it is read that far."""
        while self._stop < stop and self._grow(self._stop):
            pass
        return self._stop >= stop

    def holds(self, start: int, stop: int) -> bool:
        """Tell whether all bytes from `start` to `stop` are in memory now."""
        return bool(self._parts) and self._parts[0][0] <= start and stop <= self._stop

    def release(self, before: int) -> None:
        """Let go of the bytes before offset `before`."""
        while self._parts and self._parts[0][0] + len(self._parts[0][1]) <= before:
            self._parts.popleft()

    def _append(self, buffer: Buffer) -> None:
        if len(buffer):
            self._parts.append((self._stop, buffer))
            self._stop += len(buffer)

    @abstractmethod
    def _grow(self, start: int) -> bool:
        """Take in more bytes, of which those before `start` are not needed; False at the end of the object."""


class StreamWindow(Window):
    """A window over buffers that come one after the other; how many is known only at the end."""

    def __init__(self, buffers: Iterable[Buffer]) -> None:
        super().__init__()
        self._buffers: Iterator[Buffer] = iter(buffers)

    def _grow(self, start: int) -> bool:
        for buffer in self._buffers:
            self._append(buffer)
            return True
        return False


class RangeWindow(Window):
    """A window over an object of known size, whose bytes are read as they are asked for.

    What is not asked for is hopped over where it is longer than `hop` bytes; the reads after a hop start small.

    Args:
        read: returns the bytes of the object from start to stop, in one or more buffers.
        size: bytes of the object.
        step: bytes of one read.
        hop: bytes that cost less to read than another request does.
    """

    def __init__(self, read: Callable[[int, int], list[Buffer]], size: int, *, step: int, hop: int) -> None:
        super().__init__()
        self._read = read
        self._size = size
        self._most = self._step = step
        self._hop = hop

    def reaches(self, stop: int) -> bool:
        """Tell whether the object has at least `stop` bytes; reads nothing."""
        return stop <= self._size

    def _grow(self, start: int) -> bool:
        if start > self._stop + self._hop:
            self._parts.clear()
            self._stop = start
            self._step = min(_PROBE_BYTES, self._most)
        if self._stop >= self._size:
            return False
        for buffer in self._read(self._stop, min(self._stop + self._step, self._size)):
            self._append(buffer)
        self._step = min(self._step * 4, self._most)
        return True
