"""The one protocol of reading: ranges of object versions in, buffers out."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple, Protocol, TypeAlias

from bucketfeed.store.process import PerProcess

Buffer: TypeAlias = "bytes | memoryview"


class Range(NamedTuple):
    """Bytes `start` to `stop` (excluded) of one version of the object at `url`.

    `url` holds the key exactly as the store knows it (never percent-encoded: "#" and "?" are part of a key).
    `etag` is the version asked for; None takes whatever is there.
    """

    url: str
    start: int
    stop: int
    etag: str | None = None

    @property
    def length(self) -> int:
        """Number of bytes."""
        return self.stop - self.start

    def __str__(self) -> str:
        return f"{self.url} [{self.start}:{self.stop}]"


@dataclass(frozen=True, slots=True)
class Counts:
    """What reading has cost so far. Readers count what they ask of the store; data sets, the bytes of their samples."""

    bytes_fetched: int = 0
    bytes_read: int = 0
    requests: int = 0
    cache_hits: int = 0
    cache_misses: int = 0
    retries: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(Counts)))

    def __sub__(self, other: Counts) -> Counts:
        return Counts(*(getattr(self, f.name) - getattr(other, f.name) for f in fields(Counts)))


class Counter:
    """Adds up `Counts` over the threads of one process. A copy sent to another process starts at zero."""

    def __init__(self) -> None:
        self._lock = PerProcess(threading.Lock)  # a fork while another thread counts must not leave it held
        self._amounts = dict.fromkeys((f.name for f in fields(Counts)), 0)

    def add(self, **amounts: int) -> None:
        """Add to the named counts, e.g. ``counter.add(requests=1, bytes_fetched=n)``."""
        with self._lock.get():
            for name, amount in amounts.items():
                self._amounts[name] += amount

    def counts(self) -> Counts:
        """Return what was counted so far."""
        with self._lock.get():
            return Counts(**self._amounts)

    def __reduce__(self) -> tuple[type[Counter], tuple[()]]:
        return Counter, ()


class RangeReader(Protocol):
    """Anything that turns ranges into their bytes. Readers pickle; clients and handles stay in their process."""

    @property
    def counter(self) -> Counter:
        """Where this reader counts what it does."""
        ...

    @property
    def is_local(self) -> bool:
        """Whether the objects lie on this machine, so that a cache would only copy them."""
        ...

    def read(self, ranges: Sequence[Range]) -> list[Buffer]:
        """Return the bytes of each range, in the order asked, each exactly `stop - start` long.

        One call is one plan: its ranges are fetched at the same time. Safe to call from many threads.
        Raises `NotFoundError`, `AccessError`, `ObjectChangedError` or `ReadError`; never short or mixed bytes.
        """
        ...
