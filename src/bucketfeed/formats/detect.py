"""Which format the objects of a manifest have, told from their names."""

from __future__ import annotations

import posixpath
from collections import Counter

from bucketfeed.errors import FormatError
from bucketfeed.formats.arrays import Arrays, is_zarr
from bucketfeed.formats.delimited import Csv, Tsv
from bucketfeed.formats.lines import Jsonl
from bucketfeed.formats.parquet import Parquet
from bucketfeed.store.manifest import Manifest

# What people put beside shards, and training never reads.
_SIDECARS = frozenset((".json", ".txt", ".md", ".idx", ".index", ".yaml", ".yml", ".log", ".sha256", ".md5"))
_MARKS = frozenset(
    ("_SUCCESS", "_metadata", "_common_metadata", "LICENSE", "README", "MANIFEST", "SHA256SUMS", "MD5SUMS")
)
_NAMES = 65_536  # looked at, evenly spaced where there are more: a fraction of a second
# Text lies beside anything.
_TABLES = {format.name: format.suffixes for format in (Jsonl(), Csv(), Tsv(), Parquet(), Arrays())}
_COMPRESSED_TARS = (".tar.gz", ".tgz", ".tar.zst", ".tar.bz2", ".tar.xz")


def detect(manifest: Manifest) -> str:
    """Return the format that the objects have by their names: that of shards where all are such, and "raw" otherwise.

    Small files that describe a data set (`.json`, `.txt`, `.md`, ...) may lie beside shards, and tables beside tars and
    pictures. Raises `FormatError` for tars next to other data, for shards of two formats, and for compressed tars. Of
    a larger manifest 65,536 names are looked at.
    """
    if is_zarr(manifest):
        return "arrays"
    kinds: Counter[str] = Counter()
    example: dict[str, str] = {}
    for i in range(0, len(manifest), 1 + len(manifest) // _NAMES):
        key = manifest.key(i)
        kind = _kind(key)
        kinds[kind] += 1
        example.setdefault(kind, key)
    if kinds["compressed tar"]:
        raise FormatError(
            f"{manifest.url} has {kinds['compressed tar']} compressed tars, the first is "
            f"{example['compressed tar']!r}; ranges of them cannot be read: unpack them, or pass format='raw' to get "
            "each as one object"
        )
    if kinds["tar"] or kinds["other"]:  # arrays are shards only where nothing but arrays lies there
        kinds["other"] += kinds.pop("arrays", 0)
        example.setdefault("other", example.get("arrays", ""))
    if kinds["tar"] and kinds["other"]:
        raise FormatError(
            f"{manifest.url} has {kinds['tar']} tars (first {example['tar']!r}) and {kinds['other']} other objects "
            f"(first {example['other']!r}); pass format='tar' to read the samples in the tars only, format='raw' to "
            "get each object as a sample, or a narrower prefix"
        )
    if kinds["tar"] or kinds["other"]:
        return "tar" if kinds["tar"] else "raw"
    found = [kind for kind in _TABLES if kinds[kind]]
    if len(found) > 1:
        raise FormatError(
            f"{manifest.url} has {' and '.join(f'{kinds[kind]} of {kind} (first {example[kind]!r})' for kind in found)}"
            f"; pass format={found[0]!r} to read these only, or a narrower prefix"
        )
    return found[0] if found else "raw"


def _kind(key: str) -> str:
    name = posixpath.basename(key)
    lower = name.lower()
    if lower.endswith(".tar"):
        return "tar"
    if lower.endswith(_COMPRESSED_TARS):
        return "compressed tar"
    if name in _MARKS or name.startswith("."):
        return "sidecar"
    for kind, suffixes in _TABLES.items():
        if lower.endswith(suffixes):
            return kind
    return "sidecar" if posixpath.splitext(lower)[1] in _SIDECARS else "other"


def is_sidecar(key: str) -> bool:
    """Return whether an object of this name lies beside shards and is none itself."""
    return _kind(key) == "sidecar"
