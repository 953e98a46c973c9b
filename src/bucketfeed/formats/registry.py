"""The formats that data sets can have, by name: one line each."""

from __future__ import annotations

from bucketfeed.errors import ConfigError
from bucketfeed.formats.arrays import Arrays
from bucketfeed.formats.delimited import Csv, Tsv
from bucketfeed.formats.format import Format
from bucketfeed.formats.lines import Jsonl, Text
from bucketfeed.formats.parquet import Parquet
from bucketfeed.formats.raw import Raw
from bucketfeed.formats.tar import Tar

_FORMATS: dict[str, Format] = {
    format.name: format for format in (Raw(), Tar(), Jsonl(), Text(), Csv(), Tsv(), Arrays(), Parquet())
}


def format_of(given: str | Format) -> Format:
    """Return the format given, or called so. Raises `ConfigError`, which lists the known names."""
    if isinstance(given, Format):
        return given
    if given not in _FORMATS:
        known = ", ".join(repr(known) for known in ("auto", *_FORMATS))
        raise ConfigError(f"there is no format {given!r}; choose one of {known}")
    return _FORMATS[given]
