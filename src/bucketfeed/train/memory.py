"""Memory of a process and all its descendants, from /proc (Linux): shared pages count once."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import TracebackType


def tree(pid: int) -> list[int]:
    """Return `pid` and its living descendants; processes that end meanwhile are left out."""
    found, todo = [], [pid]
    while todo:
        found.append(todo.pop())
        try:
            for task in Path(f"/proc/{found[-1]}/task").iterdir():
                todo += map(int, (task / "children").read_text().split())
        except OSError:  # ended while we looked
            continue
    return found


def memory(pid: int, field: str = "Pss") -> int:
    """Return one sum of `smaps_rollup` in bytes (default: its proportional share); 0 if the process has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


def tree_pss(pid: int) -> int:
    """Return the proportional set size of a process tree in bytes."""
    return sum(map(memory, tree(pid)))


class PeakMemory:
    """Watches this process's tree in a thread while its `with` block runs; `peak_bytes` is the most it has seen."""

    def __init__(self, every_seconds: float = 0.5) -> None:
        self.peak_bytes = 0
        self._every = every_seconds
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="bucketfeed-memory", daemon=True)

    def _watch(self) -> None:
        while not self._done.is_set():
            self.look()
            self._done.wait(self._every)

    def look(self) -> int:
        """Measure now; return the most seen so far."""
        self.peak_bytes = max(self.peak_bytes, tree_pss(os.getpid()))
        return self.peak_bytes

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join()
        self.look()
