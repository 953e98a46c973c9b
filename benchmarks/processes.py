"""CPU time of a process and all its descendants, from /proc (Linux); their memory is measured as training does."""

from __future__ import annotations

import os
from pathlib import Path

from bucketfeed.train.memory import memory, tree, tree_pss

__all__ = ["memory", "tree", "tree_cpu_seconds", "tree_pss"]

_TICKS = os.sysconf("SC_CLK_TCK")


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
