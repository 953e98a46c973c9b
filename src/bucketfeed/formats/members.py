"""Samples as the members of a WebDataset tar: fields made into bytes, headers that are the same wherever made."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from bucketfeed.errors import ConfigError

_BLOCK = 512
END = bytes(2 * _BLOCK)  # of a tar
_TEXTS = frozenset(("txt", "text", "transcript"))
_JSONS = frozenset(("json", "jsn"))
_NUMBERS = frozenset(("cls", "cls2", "class", "count", "index", "inx", "id"))
_PICTURES = {"png": ("PNG", {}), "jpg": ("JPEG", {"quality": 95}), "jpeg": ("JPEG", {"quality": 95})}


def padded(size: int) -> int:
    """Return the bytes that `size` bytes take in a tar."""
    return -(-size // _BLOCK) * _BLOCK


_PLAIN = tarfile.TarInfo("").tobuf(tarfile.PAX_FORMAT)
_PLAIN_SUM = 8 * 32 + sum(_PLAIN) - sum(_PLAIN[124:136]) - sum(_PLAIN[148:156])
_NAME = 100  # bytes; what a plain header has room for
_LONG = 8**11


def header(path: str, size: int) -> bytes:
    """Return a member's header: of no owner and no time. One of a long name, other letters or 8 GiB takes a PAX one."""
    if is_plain(path, size):  # as tarfile makes it, in a tenth of the time
        name, digits = path.encode().ljust(_NAME, b"\0"), b"%011o\0" % size
        checksum = b"%06o\0 " % (_PLAIN_SUM + sum(name) + sum(digits))
        return b"".join((name, _PLAIN[100:124], digits, _PLAIN[136:148], checksum, _PLAIN[156:]))
    member = tarfile.TarInfo(path)
    member.size = size
    return member.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


def is_plain(path: str, size: int) -> bool:
    """Return whether one block is enough for a member's header."""
    return len(path) <= _NAME and path.isascii() and size < _LONG


class Members(NamedTuple):
    """A sample as it stands in a tar."""

    key: str
    parts: list[bytes]  # headers, data and what fills up blocks
    size: int  # of all parts
    length: int  # up to its last byte of data


def members(sample: Mapping[str, Any]) -> Members:
    """Return a sample, a dict of `"__key__"` and fields, as its members, in the order of the fields' names.

    Other names in double underscores are not fields. Raises `ConfigError`, which names sample and field, for what would
    not be read back as it is given.
    """
    key: str = sample.get("__key__")  # type: ignore[assignment]
    _check_key(key)
    fields = {name: value for name, value in sample.items() if not (name[:2] == "__" == name[-2:])}
    if not fields:
        raise ConfigError(f"sample {key!r} has no fields; give it one, or leave it out")
    for field in fields:
        _check_field(key, field)
    parts: list[bytes] = []
    size = length = 0
    for field in sorted(fields):
        data = encoded(key, field, fields[field])
        head = header(f"{key}.{field}", len(data))
        length = size + len(head) + len(data)
        size += len(head) + padded(len(data))
        parts += [head, data, bytes(size - length)]
    return Members(key, parts, size, length)


def encoded(key: str, field: str, value: Any) -> bytes:
    """Return a field's value as bytes, by what its name ends in: bytes as they are, the rest as WebDataset does it."""
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    ending = field.rpartition(".")[2]
    try:
        if ending in _TEXTS and isinstance(value, str):
            return value.encode()
        if ending in _JSONS:
            return json.dumps(value, ensure_ascii=False, allow_nan=False, default=_plain).encode()
        if ending in _NUMBERS and isinstance(value, int | np.integer) and not isinstance(value, bool):
            return str(int(value)).encode()
        if ending == "npy" and hasattr(value, "__array__"):  # also a tensor
            file = io.BytesIO()
            np.save(file, np.asarray(value), allow_pickle=False)
            return file.getvalue()
        if ending in _PICTURES and hasattr(value, "save") and hasattr(value, "mode"):  # Pillow's
            file = io.BytesIO()
            kind, options = _PICTURES[ending]
            value.save(file, kind, **options)
            return file.getvalue()
    except (TypeError, ValueError, OSError) as e:
        raise ConfigError(
            f"field {field!r} of sample {key!r} can't be made into bytes: {type(e).__name__}: {e}; give bytes"
        ) from e
    raise ConfigError(
        f"field {field!r} of sample {key!r} is {type(value).__name__}, and its name does not say how to write that; "
        "give bytes, or name it .txt (str), .json (what JSON can say), .cls (int), .npy (NumPy array), .png or .jpg "
        "(Pillow image)"
    )


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is nothing that JSON can say")


def _check_key(key: Any) -> None:
    if not isinstance(key, str):
        raise ConfigError(f"a sample's '__key__' must be text, not {key!r:.80}; or pass keys='number' (--number-keys)")
    name = key.rpartition("/")[2]
    what = (
        "ends in no name" if not name
        else "has a dot in its last part, where a field's name would begin" if "." in name
        else "has a NUL" if "\0" in key
        else "leads out of its folder" if "." in key and {".", ".."} & set(key.split("/"))
        else ""
    )  # fmt: skip
    if what:
        raise ConfigError(
            f"the key {key!r} {what}; give the sample another '__key__', or pass keys='number' (--number-keys)"
        )


def _check_field(key: str, field: Any) -> None:
    if not isinstance(field, str) or not field or "/" in field or "\0" in field:
        raise ConfigError(f"sample {key!r} has a field {field!r}; name it by what a file's name may end in, as 'jpg'")
    if field != field.lower():
        raise ConfigError(f"field {field!r} of sample {key!r} would be read back as {field.lower()!r}; name it so")
