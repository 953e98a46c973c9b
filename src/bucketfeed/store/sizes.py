"""Sizes as people write them ("50GB", "50GiB") and as they read them."""

from __future__ import annotations

import operator
import re

from bucketfeed.errors import ConfigError

_UNITS = {"": 1, "b": 1} | {
    prefix + suffix: base**power
    for power, prefix in enumerate("kmgtp", start=1)
    for suffix, base in (("", 1000), ("b", 1000), ("ib", 1024))
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?|\.\d+)\s*([a-zA-Z]*)\s*")


def parse_size(size: int | str, name: str = "size") -> int:
    """Return a size in bytes: ints as they are, "50GB" as 50 * 10**9, "50GiB" as 50 * 2**30.

    Raises `ConfigError`, naming `name`, for anything else and for negative sizes.

    >>> parse_size("1.5 GiB")
    1610612736
    """
    if not isinstance(size, str | bool) and hasattr(size, "__index__") and (number := operator.index(size)) >= 0:
        return number
    match = _SIZE.fullmatch(size) if isinstance(size, str) else None
    if match and match[2].lower() in _UNITS:
        count = float(match[1]) if "." in match[1] else int(match[1])
        return int(count * _UNITS[match[2].lower()])
    raise ConfigError(f"{name} must be a number of bytes or text such as '50GB' or '50GiB', not {size!r}")


def format_size(size: int) -> str:
    """Return a size for people, in powers of 1024, two digits after the point at most.

    >>> format_size(4 << 20)
    '4 MiB'
    """
    value, unit = float(size), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB", "PiB"):
        if abs(value) < 1024 or unit == "PiB":
            break
        value /= 1024
    return f"{value:.2f}".rstrip("0").rstrip(".") + f" {unit}"
