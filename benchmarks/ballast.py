"""Memory that a virtual machine's host has really given, handed over as it is needed.

A host takes free pages back, and the first use of each then costs here up to 4 s/GB (0.2 s/GB where it does not).
That would be counted against whoever puts more into the page cache, and more so the longer the machine was quiet.
"""

from __future__ import annotations

import mmap
import threading
import time

_BYTES = 5 << 30  # 2 GB that a cache keeps, the contestant's own, and some more
_AHEAD_BYTES = 1 << 30
_PIECE = 2 << 20  # a large page: given back, it is one free block
_SECONDS = 0.02
_SETTLE_SECONDS = 0.2  # the kernel's own work on what was given back is not the contestant's


class Ballast:
    """Memory that its `with` block gives back, piece by piece, as fast as others take free memory."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._memory.madvise(mmap.MADV_HUGEPAGE)
        for offset in range(0, _BYTES, mmap.PAGESIZE):
            self._memory[offset] = 1
        self._given = 0
        self._least = _free_bytes()
        self._stopped = threading.Event()

    def __enter__(self) -> Ballast:
        self._keep_free()  # what was used last is what others get first
        time.sleep(_SETTLE_SECONDS)
        threading.Thread(target=self._run, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()  # the thread gives back the rest

    def _run(self) -> None:
        while not self._stopped.wait(_SECONDS):
            self._keep_free()
        self._memory.close()

    def _keep_free(self) -> None:
        lacking = self._least + _AHEAD_BYTES - _free_bytes()
        while lacking > 0 and self._given < _BYTES:
            self._memory.madvise(mmap.MADV_DONTNEED, self._given, _PIECE)
            self._given += _PIECE
            lacking -= _PIECE


def _free_bytes() -> int:
    with open("/proc/meminfo") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("MemFree"))
