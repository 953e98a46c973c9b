"""Memory and CPU time of a process and all its descendants, from /proc (Linux)."""

from __future__ import annotations

import os
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")


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
    """Return the proportional set size of a process tree in bytes: shared pages count once."""
    return sum(map(memory, tree(pid)))


def tree_cpu_seconds(pid: int) -> float:
    """Return user and system time of a process tree, including descendants that ended and were waited for."""
    ticks = 0
    for member in tree(pid):
        try:
            # The name in parentheses may hold spaces: count fields from behind it (utime is the 14th of all).
            fields = Path(f"/proc/{member}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        ticks += sum(map(int, fields[11:15]))
    return ticks / _TICKS
