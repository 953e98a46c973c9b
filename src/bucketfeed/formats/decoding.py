"""What a process shares while it decodes row groups: locks of the node, room in memory, what was read last."""

from __future__ import annotations

import contextlib
import fcntl
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]

_RECENT_BYTES = 16 << 20  # of decoded extents that are kept for reads of single rows
_DECODING_BYTES = 96 << 20  # that a process may hold of row groups under way


class NodeLock:
    """An exclusive lock of the node that may be released by another thread than took it."""

    def __init__(self, file: Any) -> None:
        self._file = file

    @classmethod
    def taken(cls, path: Any) -> NodeLock | None:
        """Return the lock at `path`; None while another has it."""
        file = open(path, "ab")  # noqa: SIM115
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return None
        return cls(file)

    def release(self) -> None:
        """Give it up."""
        with self._file:
            fcntl.flock(self._file, fcntl.LOCK_UN)  # which closing would not do where a fork has happened meanwhile


class Recent:
    """The extents that single rows were last read from, within a bound of bytes."""

    def __init__(self) -> None:
        self._held: OrderedDict[int, pa.RecordBatch] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def get(self, piece: int, make: Callable[[], pa.RecordBatch]) -> pa.RecordBatch:
        """Return the rows of a piece, made where it is not held."""
        with self._lock:
            if (found := self._held.get(piece)) is not None:
                self._held.move_to_end(piece)
                return found
        found = make()
        with self._lock:
            if piece not in self._held:
                self._held[piece] = found
                self._bytes += found.nbytes
            while self._bytes > _RECENT_BYTES and self._held:
                self._bytes -= self._held.popitem(last=False)[1].nbytes
        return found


class Room:
    """How many bytes may be decoded at a time in this process."""

    def __init__(self) -> None:
        self._left = _DECODING_BYTES
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def taken(self, amount: int) -> Iterator[None]:
        """Wait until there is room for `amount` bytes, and take it for the `with` block."""
        with self._changed:
            self._changed.wait_for(lambda: self._left >= amount)
            self._left -= amount
        try:
            yield
        finally:
            with self._changed:
                self._left += amount
                self._changed.notify_all()
