"""Whole numbers as arguments: numpy's are as good as Python's, and truth values are not."""

from __future__ import annotations

import operator
from typing import SupportsIndex

from bucketfeed.errors import ConfigError


def whole(name: str, value: SupportsIndex, least: int, most: int | None = None) -> int:
    """Return `value` as an int. Raises `ConfigError` unless it is a whole number from `least` to `most`."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or number < least or (most is not None and number > most):
        bounds = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise ConfigError(f"{name} must be a whole number {bounds}, not {value!r}")
    return number
