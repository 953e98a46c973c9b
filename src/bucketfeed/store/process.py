"""Things that must not cross a process: clients, sockets, locks and thread pools."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class PerProcess(Generic[T]):
    """A value made once in each process that asks for it, by a factory.

    A forked child or an unpickled copy makes its own; only the factory travels, so it must pickle
    where its owner does. `get` takes no lock, so a fork can't inherit a held one: two threads that
    ask at the same time may both run the factory, and then share one result.
    """

    def __init__(self, factory: Callable[[], T]) -> None:
        self._factory = factory
        self._values: dict[int, T] = {}

    def get(self) -> T:
        """Return this process's value."""
        pid = os.getpid()
        try:
            return self._values[pid]
        except KeyError:
            # What the parent left here stays referenced: closing an inherited client here could hang.
            return self._values.setdefault(pid, self._factory())

    def forget(self) -> None:
        """Let the next `get` in this process make a new value."""
        self._values.pop(os.getpid(), None)

    def __reduce__(self) -> tuple[type[PerProcess[T]], tuple[Callable[[], T]]]:
        return type(self), (self._factory,)
