"""Compressed objects: told from their names, decompressed front to back in bounded pieces, all members and frames."""

from __future__ import annotations

import bz2
import functools
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

from bucketfeed.errors import ConfigError, FormatError
from bucketfeed.store.ranges import Buffer

SUFFIXES = {".gz": "gzip", ".zst": "zstd", ".bz2": "bzip2"}

_PIECE_BYTES = 4 << 20  # decompressed at most at a time, where the library takes a bound
_ZSTD_INPUT_BYTES = 64 << 10  # fed at a time, since the output of a call can't be bounded
_ZSTD_WINDOW_BYTES = 1 << 31  # what --long=31 needs


@functools.lru_cache(4096)  # asked for each sample that is read
def codec_of(key: str) -> str | None:
    """Return how the object called `key` is compressed: "gzip", "zstd", "bzip2", or None."""
    lower = key.lower()
    return next((codec for suffix, codec in SUFFIXES.items() if lower.endswith(suffix)), None)


def decompressed(codec: str, buffers: Iterable[Buffer], url: str) -> Iterator[Buffer]:
    """Yield what `buffers` hold, which are the compressed object at `url` from front to back.

    Raises `FormatError` where it is damaged or ends early, and `ConfigError` where zstandard is not installed.
    """
    make = _zstd() if codec == "zstd" else _MADE[codec]
    stream: _Stream | None = None
    members = seen = 0
    for buffer in buffers:
        data: Buffer = memoryview(buffer)
        while len(data):
            if stream is None:
                if members and codec == "gzip" and data[0] == 0:
                    data = bytes(data).lstrip(b"\0")  # padding, which gzip passes over too
                    continue
                stream = make()
                members += 1
            try:
                while True:
                    piece, data = stream.feed(data)
                    if piece:
                        yield piece
                    if stream.eof or not (len(data) or stream.has_more):
                        break
            except Exception as e:
                if not _is_damage(e):
                    raise
                raise FormatError(
                    f"{url}: damaged {codec} data within {seen + len(buffer):,} compressed bytes: {e}; write or copy "
                    "the object again"
                ) from e
            if stream.eof:
                data, stream = stream.rest(data), None
        seen += len(buffer)
    if stream is not None:
        raise FormatError(
            f"{url}: the {codec} data ends early, after {seen:,} compressed bytes; write or copy the object again"
        )


class _Stream(Protocol):
    """One member or frame."""

    @property
    def eof(self) -> bool: ...

    @property
    def has_more(self) -> bool: ...

    def feed(self, data: Buffer) -> tuple[bytes, Buffer]:
        """Return some output, and the input that is left."""
        ...

    def rest(self, data: Buffer) -> Buffer:
        """Return the input behind the end of this member."""
        ...


class _Gzip:
    def __init__(self) -> None:
        self._stream = zlib.decompressobj(wbits=31)
        self.has_more = False

    @property
    def eof(self) -> bool:
        return self._stream.eof

    def feed(self, data: Buffer) -> tuple[bytes, Buffer]:
        piece = self._stream.decompress(data, _PIECE_BYTES)
        self.has_more = len(piece) == _PIECE_BYTES
        return piece, self._stream.unconsumed_tail

    def rest(self, data: Buffer) -> Buffer:
        return self._stream.unused_data


class _Bzip2:
    def __init__(self) -> None:
        self._stream = bz2.BZ2Decompressor()

    @property
    def eof(self) -> bool:
        return self._stream.eof

    @property
    def has_more(self) -> bool:
        return not self._stream.needs_input

    def feed(self, data: Buffer) -> tuple[bytes, Buffer]:
        return self._stream.decompress(data, _PIECE_BYTES), b""

    def rest(self, data: Buffer) -> Buffer:
        return self._stream.unused_data


def _zstd() -> Callable[[], _Stream]:
    try:
        import zstandard
    except ImportError as e:
        raise ConfigError(f"zstandard is not here ({e}); install it: pip install 'bucketfeed[zstd]'") from e

    class Zstd:
        has_more = False

        def __init__(self) -> None:
            self._stream = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW_BYTES).decompressobj()

        @property
        def eof(self) -> bool:
            return bool(self._stream.eof)

        def feed(self, data: Buffer) -> tuple[bytes, Buffer]:
            return self._stream.decompress(data[:_ZSTD_INPUT_BYTES]), data[_ZSTD_INPUT_BYTES:]

        def rest(self, data: Buffer) -> Buffer:
            return bytes(self._stream.unused_data) + bytes(data)

    return Zstd


_MADE: dict[str, Callable[[], Any]] = {"gzip": _Gzip, "bzip2": _Bzip2}


def _is_damage(error: Exception) -> bool:
    return isinstance(error, zlib.error | OSError | EOFError) or type(error).__name__ == "ZstdError"
