"""What an index build has found so far, shard by shard, so that one that was interrupted goes on."""

from __future__ import annotations

import fcntl
import logging
import os
import struct
import time
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import numpy as np
import xxhash
from numpy.typing import NDArray

from bucketfeed.errors import CacheError

_log = logging.getLogger(__name__)

Ints = NDArray[np.int64]

_RECORD = struct.Struct("<QQQ")  # shard, samples, checksum of the arrays that follow
_POLL_SECONDS = 0.2


class Journal:
    """A file of finished shards, held by one process at a time; others that build the same index wait for it.

    A process that dies sets the file free, with all shards that it had finished.

    Args:
        path: where the file is, until `remove`.
        name: of the index that it belongs to; the records of another one are dropped.
    """

    def __init__(self, path: Path, name: str) -> None:
        self._path = path
        self._name = name.encode() + b"\n"
        self._found: dict[int, tuple[Ints, Ints]] = {}
        self._file: BinaryIO | None = None

    def __enter__(self) -> Journal:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._locked()
            self._load()
        except OSError as e:
            raise CacheError(
                f"the index can't be built at {self._path.parent}: {e}; choose another cache folder or index path"
            ) from e
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._file is not None
        self._file.close()

    def __contains__(self, shard: int) -> bool:
        return shard in self._found

    def __getitem__(self, shard: int) -> tuple[Ints, Ints]:
        """Return starts and lengths of the samples of `shard`."""
        return self._found[shard]

    def add(self, shard: int, starts: Ints, lengths: Ints) -> None:
        """Keep what was found in `shard`."""
        assert self._file is not None
        self._found[shard] = starts, lengths
        payload = starts.astype("<i8").tobytes() + lengths.astype("<i8").tobytes()
        try:
            self._file.write(_RECORD.pack(shard, len(starts), xxhash.xxh3_64_intdigest(payload)) + payload)
            self._file.flush()
        except OSError as e:
            raise CacheError(f"{self._path} can't be written: {e}; make room or choose another cache folder") from e

    def take(self, shard: int, starts: Ints, lengths: Ints) -> None:
        """Know what an earlier index has of `shard`; it is not written, since it can be taken from there again."""
        self._found[shard] = starts, lengths

    def remove(self) -> None:
        """Remove the file: the index is complete."""
        self._path.unlink(missing_ok=True)

    def _locked(self) -> BinaryIO:
        waiting = False
        while True:
            file = open(self._path, "a+b")  # noqa: SIM115 (closed by __exit__)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.close()
                if not waiting:
                    waiting = True
                    _log.info("waiting for another process that builds the index %s", self._path)
                time.sleep(_POLL_SECONDS)
                continue
            try:
                same = os.path.samestat(os.fstat(file.fileno()), os.stat(self._path))
            except FileNotFoundError:
                same = False
            if same:
                return file
            file.close()  # its holder finished and removed it

    def _load(self) -> None:
        assert self._file is not None
        self._file.seek(0)
        good = 0
        if self._file.readline() == self._name:
            good = self._file.tell()
            while (record := self._next()) is not None:
                shard, starts, lengths = record
                self._found[shard] = starts, lengths
                good = self._file.tell()
        self._file.truncate(good)
        self._file.seek(good)
        if not good:
            self._file.write(self._name)

    def _next(self) -> tuple[int, Ints, Ints] | None:
        """Return the next record; None at the end or where a write was cut short."""
        assert self._file is not None
        head = self._file.read(_RECORD.size)
        if len(head) < _RECORD.size:
            return None
        shard, count, checksum = _RECORD.unpack(head)
        payload = self._file.read(16 * count) if count <= os.fstat(self._file.fileno()).st_size // 16 else b""
        if len(payload) != 16 * count or xxhash.xxh3_64_intdigest(payload) != checksum:
            return None
        both = np.frombuffer(payload, "<i8").astype(np.int64)
        return shard, both[:count], both[count:]
