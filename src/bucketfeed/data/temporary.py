"""The folder of what lasts as long as this process."""

from __future__ import annotations

import functools
import os
import shutil
import tempfile
import weakref
from dataclasses import dataclass
from pathlib import Path


@dataclass(eq=False)
class _Temporary:
    """A folder that ends with the process that made it."""

    path: Path

    def __post_init__(self) -> None:
        weakref.finalize(self, _remove, self.path, os.getpid())


def _remove(path: Path, pid: int) -> None:
    if os.getpid() == pid:  # a forked worker that ends must not take its parent's files along
        shutil.rmtree(path, ignore_errors=True)


@functools.cache
def _temporary() -> _Temporary:
    return _Temporary(Path(tempfile.mkdtemp(prefix="bucketfeed-")))


def temporary_folder() -> Path:
    """Return a folder that is there until this process ends."""
    return _temporary().path
