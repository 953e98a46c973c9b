"""Tells glibc's malloc which freed memory to keep: that of one batch for the next, not that of a scan."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os

# Numbers of <malloc.h>.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
_KEPT_BYTES = 64 << 20
_LARGEST_ON_HEAP_BYTES = 32 << 20  # the most that glibc takes


@functools.cache
def keep_freed_memory() -> None:
    """Tell glibc's malloc, once in this process, to keep up to 64 MiB of freed memory, in one arena a core.

    Samples come and go by the megabyte; with the defaults each batch is trimmed away when the loop drops it, and every
    page of the next one faults in again. More arenas than cores only keep more of it. Does nothing where malloc is
    another one. docs/decisions/0006 has the numbers.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return
    mallopt(_MMAP_THRESHOLD, _LARGEST_ON_HEAP_BYTES)
    mallopt(_TRIM_THRESHOLD, _KEPT_BYTES)
    mallopt(_ARENA_MAX, os.cpu_count() or 1)


def give_freed_memory_back() -> None:
    """Return to the system what was freed: scanning a large shard leaves more of it than training ever needs.

    Does nothing where malloc is not glibc's.
    """
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
