"""Which format the objects of a manifest have, told from their names."""

from __future__ import annotations

import posixpath
from collections import Counter

from bucketfeed.errors import FormatError
from bucketfeed.store.manifest import Manifest

# What people put beside shards, and training never reads.
_SIDECARS = frozenset((".json", ".txt", ".md", ".idx", ".index", ".yaml", ".yml", ".csv", ".log", ".sha256", ".md5"))
_MARKS = frozenset(("_SUCCESS", "LICENSE", "README", "MANIFEST", "SHA256SUMS", "MD5SUMS"))
_NAMES = 65_536  # looked at, evenly spaced where there are more: a fraction of a second
_COMPRESSED_TARS = (".tar.gz", ".tgz", ".tar.zst", ".tar.bz2", ".tar.xz")


def detect(manifest: Manifest) -> str:
    """Return "tar" where the objects are tars, and "raw" otherwise.

    Small files that describe a data set (`.json`, `.txt`, `.md`, ...) may lie beside tars. Raises `FormatError` for
    tars next to other data, and for compressed tars. Of a larger manifest 65,536 names are looked at.
    """
    kinds: Counter[str] = Counter()
    example: dict[str, str] = {}
    for i in range(0, len(manifest), 1 + len(manifest) // _NAMES):
        key = manifest.key(i)
        kind = _kind(key)
        kinds[kind] += 1
        example.setdefault(kind, key)
    if kinds["compressed"]:
        raise FormatError(
            f"{manifest.url} has {kinds['compressed']} compressed tars, the first is {example['compressed']!r}; ranges "
            "of them cannot be read: unpack them, or pass format='raw' to get each as one object"
        )
    if kinds["tar"] and kinds["other"]:
        raise FormatError(
            f"{manifest.url} has {kinds['tar']} tars (first {example['tar']!r}) and {kinds['other']} other objects "
            f"(first {example['other']!r}); pass format='tar' to read the samples in the tars only, format='raw' to "
            "get each object as a sample, or a narrower prefix"
        )
    return "tar" if kinds["tar"] else "raw"


def _kind(key: str) -> str:
    name = posixpath.basename(key)
    lower = name.lower()
    if lower.endswith(".tar"):
        return "tar"
    if lower.endswith(_COMPRESSED_TARS):
        return "compressed"
    if name in _MARKS or name.startswith(".") or posixpath.splitext(lower)[1] in _SIDECARS:
        return "sidecar"
    return "other"
