"""Headers of `.npy`, and the members of `.npz`."""

from __future__ import annotations

import ast
import math
import struct
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from bucketfeed.errors import FormatError
from bucketfeed.formats.sources import Files, Plain, Source

HEAD_BYTES = 1024  # holds nearly every header: longer ones take a second read
_MAGIC = b"\x93NUMPY"
_LOCAL_HEADER = struct.Struct("<26xHH")


def array_at(head: bytes, where: str, number: int, offset: int, size: int) -> tuple[int, Plain | None]:
    """Return the array whose file of `size` bytes at `offset` of object `number` begins with `head`.

    With it comes how many bytes its header needs; None where `head` is shorter. Raises `FormatError`.
    """
    if size < 12 or head[:6] != _MAGIC:
        raise FormatError(f"{where} is no .npy file: it begins {head[:6]!r}, not {_MAGIC!r}; check how it was written")
    wide = head[6] > 1
    start = 12 if wide else 10
    stop = start + int.from_bytes(head[8:start], "little")
    if stop > size:
        raise FormatError(f"{where} is cut short: its header ends at byte {stop}, the file at {size}; copy it again")
    if stop > len(head):
        return stop, None
    try:
        said = ast.literal_eval(head[start:stop].decode("utf-8" if head[6] > 2 else "latin-1").strip())
        shape, fortran = tuple(int(n) for n in said["shape"]), bool(said["fortran_order"])
        dtype = np.lib.format.descr_to_dtype(said["descr"])
    except Exception as e:
        raise FormatError(f"{where} has a header that can't be read: {e}; write it with numpy.save") from e
    check_dtype(dtype, where)
    needed, got = math.prod(shape) * dtype.itemsize, size - stop
    if got < needed:
        rows = got // (needed // shape[0]) if shape else 0
        raise FormatError(
            f"{where} is cut short: its header promises shape {shape} of {dtype}, {needed:,} bytes, but {got:,} come, "
            f"the end of row {rows - 1}; copy the file again"
        )
    return stop, Plain(number, shape, dtype, offset + stop, fortran and len(shape) > 1)


def check_dtype(dtype: np.dtype, where: str) -> None:
    """Raise `FormatError` where values of this dtype are not in the bytes themselves."""
    if dtype.hasobject:
        raise FormatError(
            f"{where} holds pickled objects (dtype {dtype}), which are never loaded: unpickling runs code of whoever "
            "wrote the file; save it as numbers, text of fixed length, or JSON lines"
        )


def read_heads(files: Files, objects: list[int]) -> Iterator[Plain]:
    """Yield the array of each `.npy` object, all headers read at once."""
    manifest = files.manifest
    sizes = [manifest.size(number) for number in objects]
    ranges = [manifest.range(n, 0, min(size, HEAD_BYTES)) for n, size in zip(objects, sizes, strict=True)]
    for number, size, head in zip(objects, sizes, files.reader.read(ranges), strict=True):
        url = manifest.object_url(number)
        stop, found = array_at(bytes(head), url, number, 0, size)
        if found is None:
            _, found = array_at(bytes(files.read(number, [(0, stop)])[0]), url, number, 0, size)
        assert found is not None
        yield found


@dataclass(frozen=True)
class Deflated(Source):
    """A compressed member of an `.npz`: decoded from front to back.

    Attributes:
        member: its name in the archive.
        skip: bytes of its header.
    """

    member: str = ""
    skip: int = 0
    fortran: bool = False
    sequential = True

    def rows(self, files: Files, start: int, stop: int) -> np.ndarray:
        """Return rows `start` to `stop`, from the beginning of the member on."""
        with zipfile.ZipFile(files.file(self.number)) as archive, archive.open(self.member) as file:
            row = self.dtype.itemsize * math.prod(self.shape[1:])
            file.seek(self.skip + row * start)
            return np.frombuffer(file.read(row * (stop - start)), self.dtype).reshape(-1, *self.shape[1:])

    def blocks(self, files: Files, rows: int) -> Iterator[np.ndarray]:
        """Yield all rows, so many at a time; in Fortran order the whole array is held meanwhile."""
        row = self.dtype.itemsize * math.prod(self.shape[1:])
        with zipfile.ZipFile(files.file(self.number)) as archive, archive.open(self.member) as file:
            file.read(self.skip)
            if self.fortran:
                flat = np.frombuffer(file.read(row * self.shape[0]), self.dtype)
                array = flat.reshape(self.shape, order="F")
                yield from (array[at : at + rows] for at in range(0, self.shape[0], rows))
                return
            for at in range(0, self.shape[0], rows):
                some = min(rows, self.shape[0] - at)
                yield np.frombuffer(file.read(row * some), self.dtype).reshape(some, *self.shape[1:])


def npz_members(files: Files, number: int) -> dict[str, Source]:
    """Return the arrays of an `.npz` by name: those stored as they are by their place in it. Raises `FormatError`."""
    url = files.manifest.object_url(number)
    found: dict[str, Source] = {}
    try:
        with zipfile.ZipFile(files.file(number)) as archive:
            for info in archive.infolist():
                if info.filename.endswith(".npy"):
                    name = info.filename.removesuffix(".npy")
                    found[name] = _member(files, number, archive, info, f"{url} member {name!r}")
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError) as e:
        raise FormatError(f"{url} is no .npz that can be read: {e}; write it again with numpy.savez") from e
    if not found:
        raise FormatError(f"{url} holds no arrays; write it with numpy.savez")
    return found


def _member(files: Files, number: int, archive: zipfile.ZipFile, info: Any, where: str) -> Source:
    with archive.open(info) as file:
        head = file.read(HEAD_BYTES)
        stop, array = array_at(head, where, number, 0, info.file_size)
        if array is None:
            head += file.read(stop - len(head))
            _, array = array_at(head, where, number, 0, info.file_size)
    assert array is not None
    if info.compress_type != zipfile.ZIP_STORED:
        return Deflated(number, array.shape, array.dtype, info.filename, stop, array.fortran)
    at = info.header_offset
    local = files.read(number, [(at, at + _LOCAL_HEADER.size)], kept=True)[0]
    data = at + _LOCAL_HEADER.size + sum(_LOCAL_HEADER.unpack(local))
    return Plain(number, array.shape, array.dtype, data + stop, array.fortran)
