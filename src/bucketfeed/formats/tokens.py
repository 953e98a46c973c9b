"""Flat files of tokens, as trainers of language models read them: windows, next tokens and document masks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import DTypeLike

from bucketfeed.cache.disk import DiskCache
from bucketfeed.errors import ConfigError, FormatError
from bucketfeed.formats.arrays import RowFormat
from bucketfeed.formats.layout import Field, Layout, Shards
from bucketfeed.formats.npy import read_heads
from bucketfeed.formats.rows import ArrayIndex
from bucketfeed.formats.sources import Files
from bucketfeed.store.manifest import Manifest
from bucketfeed.store.ranges import RangeReader


@dataclass(frozen=True)
class Tokens(RowFormat):
    """Windows of tokens, with the tokens that follow them and where documents begin and end in them.

    Args:
        dtype: of tokens in `.bin` files; `.npy` files say theirs.
        header_bytes: passed over at the start of each `.bin` file.
        targets: whether each sample has the tokens shifted by one as well.
        eos: the token that ends a document; None where there are no documents.
    """

    name: ClassVar[str] = "tokens"
    suffixes: ClassVar[tuple[str, ...]] = (".bin", ".npy")
    window: int | None = 1024
    dtype: str = "uint16"
    header_bytes: int = 0
    targets: bool = True
    eos: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window is None:
            raise ConfigError("window must be the number of tokens in a sample, not None")
        if token_type(self.dtype).kind not in "iu":
            raise ConfigError(f"dtype must be one of whole numbers, such as 'uint16', not {self.dtype!r}")

    @property
    def rows_per_sample(self) -> int:
        """How many tokens are read for a sample: one more than the window with targets."""
        return (self.window or 1) + self.targets

    def closed(self, manifest: Manifest, reader: RangeReader, cache: DiskCache | None) -> ArrayIndex:
        """Return the index: only headers of `.npy` files are read."""
        named = [n for n in range(len(manifest)) if manifest.key(n).lower().endswith(self.suffixes)]
        objects = named or list(range(len(manifest)))
        arrays = [n for n in objects if manifest.key(n).lower().endswith(".npy")]
        if arrays and len(arrays) < len(objects):
            raise FormatError(f"{manifest.url} has both .npy and .bin files of tokens; open one kind at a time")
        heads = list(read_heads(Files(manifest, reader), arrays))
        dtypes = {head.dtype for head in heads} or {token_type(self.dtype)}
        for head in heads:
            if len(head.shape) != 1 or head.dtype.kind not in "iu" or len(dtypes) > 1:
                raise FormatError(
                    f"{manifest.object_url(head.number)} has shape {head.shape} of {head.dtype}: tokens are whole "
                    f"numbers of shape (n,), of one dtype in all files; use open_arrays for other arrays"
                )
        dtype = dtypes.pop()
        if heads:
            offsets, rows = [head.offset for head in heads], [head.shape[0] for head in heads]
        else:
            offsets = [self.header_bytes] * len(objects)
            rows = [self._tokens(manifest, number, dtype.itemsize) for number in objects]
        shards = Shards(np.array(objects, np.int64), np.array(offsets, np.int64), np.array(rows, np.int64))
        return ArrayIndex(manifest, self, Layout((Field("tokens", dtype, ()),)), shards)

    def _tokens(self, manifest: Manifest, number: int, item: int) -> int:
        tokens, rest = divmod(manifest.size(number) - self.header_bytes, item)
        if rest or tokens < 0:
            raise FormatError(
                f"{manifest.object_url(number)} has {manifest.size(number):,} bytes, which {self.header_bytes} of a "
                f"header and whole tokens of {item} bytes ({self.dtype}) do not make; check dtype= and header_bytes="
            )
        return tokens

    def finished(self, columns: dict[str, Any]) -> dict[str, Any]:
        """Return `tokens` (and `targets`) as int64, and with `eos` what tells documents apart.

        `documents` counts them within the window from 0, `positions` the tokens since a document's (or the window's)
        beginning, `mask` is False where the target belongs to another document than its token.
        """
        read = columns["tokens"].astype(np.int64)
        tokens = read[:, : self.window]
        found = {"tokens": tokens}
        if self.targets:
            found["targets"] = read[:, 1:]
        if self.eos is not None:
            ends = tokens == self.eos
            begins = np.zeros_like(ends)
            begins[:, 1:] = ends[:, :-1]
            places = np.arange(tokens.shape[1])
            found["documents"] = np.cumsum(begins, axis=1)
            found["positions"] = places - np.maximum.accumulate(np.where(begins, places, 0), axis=1)
            if self.targets:
                found["mask"] = ~ends
        return found


def token_type(dtype: DTypeLike) -> np.dtype:
    """Return the numpy dtype. Raises `ConfigError`."""
    try:
        return np.dtype(dtype)
    except TypeError as e:
        raise ConfigError(f"dtype {dtype!r} is none that numpy knows: {e}; use 'uint16', '>u4', ...") from e
