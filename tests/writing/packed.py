"""What is packed in tests, and other ways to look at the result."""

from __future__ import annotations

import random
import tarfile
from pathlib import Path
from typing import Any

import bucketfeed as bf


def photos(folder: Path, count: int = 60, size: int = 3000) -> Path:
    """Make files `d/000.jpg` and `d/000.cls` of random bytes and lengths."""
    r = random.Random(7)
    (folder / "d").mkdir(parents=True)
    for i in range(count):
        (folder / "d" / f"{i:03}.jpg").write_bytes(r.randbytes(r.randrange(size)))
        (folder / "d" / f"{i:03}.cls").write_bytes(str(i % 10).encode())
    return folder


def opened(url: Any, **options: Any) -> bf.MapDataset:
    return bf.open_dataset(url, progress=False, **options)


def contents(folder: Path) -> dict[str, bytes]:
    """Return what a folder holds, without the record and the index, which name versions of files."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if not path.name.startswith("_")}


def untarred(folder: Path) -> dict[str, bytes]:
    """Return all members of all shards as the standard library reads them."""
    found: dict[str, bytes] = {}
    for path in sorted(folder.glob("*.tar")):
        with tarfile.open(path) as archive:
            for member in archive:
                file = archive.extractfile(member)
                assert file is not None
                assert member.name not in found
                found[member.name] = file.read()
    return found
