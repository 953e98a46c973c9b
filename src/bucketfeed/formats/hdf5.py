"""Datasets of HDF5 files: contiguous ones by range, all others through h5py, with a handle of each process's own."""

from __future__ import annotations

import atexit
import functools
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np

from bucketfeed.errors import ConfigError, FormatError
from bucketfeed.formats.npy import check_dtype
from bucketfeed.formats.sources import Files, Plain, Source

_open_files: weakref.WeakSet[Any] = weakref.WeakSet()


@atexit.register
def _close_files() -> None:
    """Close what is still open: HDF5 itself would do it after the interpreter's end, and crash on our file object."""
    for file in list(_open_files):
        file.close()


@dataclass(frozen=True)
class Hdf5(Source):
    """A chunked or compact dataset, decoded by h5py over the cached object."""

    path: str = ""
    step: int = 1

    def rows(self, files: Files, start: int, stop: int) -> np.ndarray:
        """Return rows `start` to `stop`."""
        rows: np.ndarray = _opened(files, self.number)[self.path][start:stop]
        return rows


def hdf5_members(files: Files, number: int, paths: list[str] | None) -> dict[str, Source]:
    """Return datasets of an object by path; those of its root group where `paths` is None. Raises `FormatError`."""
    file = _opened(files, number)
    names = [name for name, item in file.items() if hasattr(item, "shape")] if paths is None else paths
    found: dict[str, Source] = {}
    for name in names:
        item = file.get(name)
        where = f"{files.manifest.object_url(number)} dataset {name!r}"
        if not hasattr(item, "shape"):
            raise FormatError(f"{where} is not there; the file has {sorted(file)}")
        if item.shape is None:
            raise FormatError(f"{where} is empty: it has no shape; name others with fields=")
        check_dtype(item.dtype, where)
        at = item.id.get_offset()
        if item.chunks is None and at is not None and item.external is None and not file.userblock_size:
            found[name] = Plain(number, item.shape, _bare(item.dtype), at)
        else:
            found[name] = Hdf5(number, item.shape, _bare(item.dtype), name, item.chunks[0] if item.chunks else 1)
    return found


def _bare(dtype: np.dtype) -> np.dtype:
    """Return the dtype without what h5py notes in it, so that it pickles and compares as numpy's own."""
    return np.dtype(dtype.str) if dtype.names is None and dtype.subdtype is None else dtype


def _opened(files: Files, number: int) -> Any:
    return files.handle(("hdf5", number), functools.partial(_open, files, number))


def _open(files: Files, number: int) -> Any:
    try:
        import h5py  # type: ignore[import-untyped]
    except ImportError as e:
        raise ConfigError(f"HDF5 needs another package ({e}): pip install 'bucketfeed[arrays]'") from e
    try:
        file = h5py.File(files.file(number), "r")
    except OSError as e:
        url = files.manifest.object_url(number)
        raise FormatError(f"{url} can't be opened as HDF5: {e}; check how it was written, or copy it again") from e
    _open_files.add(file)
    return file
