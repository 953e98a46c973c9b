"""Opens arrays and files of tokens as data sets."""

from __future__ import annotations

import os
from typing import Any, Literal

import numpy as np
from numpy.typing import DTypeLike

from bucketfeed.cache.disk import DiskCache
from bucketfeed.data.dataset import Decode, MapDataset, open_dataset
from bucketfeed.errors import ConfigError
from bucketfeed.formats.arrays import Arrays
from bucketfeed.formats.tokens import Tokens, token_type


def open_arrays(
    url: str | os.PathLike[str],
    *,
    window: int | None = None,
    stride: int | None = None,
    decode: Decode | None = None,
    cache: DiskCache | Literal["auto"] | None = "auto",
    storage_options: dict[str, Any] | None = None,
    progress: bool = True,
    **fields: str,
) -> MapDataset:
    """Return rows of arrays as a data set: each sample has `"__key__"` and a field for each array.

    Args:
        url: of an `.npy`, `.npz` or HDF5 object, of a prefix of several that are shards of one, or of a Zarr hierarchy.
        window: rows in a sample, along a first axis; None gives single rows.
        stride: rows from one sample to the next; as many as the window has where None.
        decode: see `open_dataset`, as are `cache`, `storage_options` and `progress`.
        **fields: name each field's array: a member of the file, or an `.npy` object under the prefix. All arrays by
            their own names where none is given, `array` for the one in an `.npy`.

    Raises: as `open_dataset`.

    >>> bf.open_arrays("s3://bucket/train.h5", data="images/x", target="y")
    """
    if not all(isinstance(path, str) for path in fields.values()):
        raise ConfigError(f"fields must name arrays, as in data='x', target='y', not {fields!r}")
    format = Arrays(window=window, stride=stride, fields=tuple(fields.items()) or None)
    return open_dataset(
        url, format=format, decode=decode, cache=cache, storage_options=storage_options, progress=progress
    )


class TokenDataset(MapDataset):
    """Windows over flat files of tokens, `.bin` or `.npy`; several files under a prefix are shards.

    A sample has `tokens` and `targets`, the same shifted by one, int64 of shape (window,). With `eos` it also has
    `documents` (number of each token's document in the window), `positions` (since the document's beginning) and `mask`
    (False where the target is of the next document). Windows end with their file; tokens that fill none are left out.

    Args:
        url: of one file, or of a prefix.
        dtype: of tokens in `.bin` files; `.npy` files say theirs.
        window: tokens in a sample.
        stride: tokens from one sample to the next; the window's where None.
        eos: the token that ends each document.
        targets: whether there are targets; without, only the window itself is read.
        document_mask: False leaves `documents`, `positions` and `mask` out.
        header_bytes: passed over at the start of each `.bin` file.
        decode: see `open_dataset`, as are `cache`, `storage_options` and `progress`.

    >>> bf.TokenDataset("s3://bucket/tokens/train.bin", window=1024, eos=50256)
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        dtype: DTypeLike = np.uint16,
        window: int = 1024,
        stride: int | None = None,
        eos: int | None = None,
        targets: bool = True,
        document_mask: bool = True,
        header_bytes: int = 0,
        decode: Decode | None = None,
        cache: DiskCache | Literal["auto"] | None = "auto",
        storage_options: dict[str, Any] | None = None,
        progress: bool = True,
    ) -> None:
        format = Tokens(
            window=window,
            stride=stride,
            dtype=token_type(dtype).str,
            header_bytes=header_bytes,
            targets=targets,
            eos=eos if document_mask else None,
        )
        opened = open_dataset(
            url, format=format, decode=decode, cache=cache, storage_options=storage_options, progress=progress
        )
        super().__init__(opened.index, opened.reader, decode)
