"""Arrays that all processes of a node share: large ones lie in a temporary file that each maps."""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from bucketfeed.errors import CacheError

_MAPPED_BYTES = 1 << 20


class SharedArray:
    """A one-dimensional array of numbers, in memory, or mapped from a file that ends with the process that made it.

    Pickles as its values, or as the file's path.
    """

    def __init__(self, values: np.ndarray) -> None:
        self.values, self._path = np.ascontiguousarray(values), None
        if self.values.nbytes > _MAPPED_BYTES:
            try:
                handle, path = tempfile.mkstemp(prefix="bucketfeed-view-")
                with open(handle, "wb") as file:
                    file.write(self.values.data)
            except OSError as e:
                raise CacheError(f"the numbers of a view can't be written: {e}; make room, or set TMPDIR") from e
            self._set(_mapped(path, self.values.dtype.str), path)
            weakref.finalize(self, _remove, path, os.getpid())

    def _set(self, values: np.ndarray, path: str | None) -> None:
        self.values, self._path = values, path  # type: ignore[assignment]

    def __len__(self) -> int:
        return len(self.values)

    def __reduce__(self) -> tuple[Callable[..., SharedArray], tuple[Any, ...]]:
        return _shared, (type(self), self.values if self._path is None else self.values.dtype.str, self._path)


def _shared(kind: type[SharedArray], values: Any, path: str | None) -> SharedArray:
    shared = kind.__new__(kind)
    shared._set(values if path is None else _mapped(path, values), path)
    return shared


def _mapped(path: str, dtype: str) -> np.ndarray:
    try:
        with open(path, "rb") as file:
            return np.frombuffer(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ), dtype)
    except OSError as e:
        raise CacheError(f"the numbers of a view can't be opened: {e}; make the view again in this process") from e


def _remove(path: str, pid: int) -> None:
    if os.getpid() == pid and os.path.exists(path):
        os.unlink(path)
