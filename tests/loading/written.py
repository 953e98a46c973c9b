"""Small data sets on disk, the same samples as raw objects and as tars, and what loaders gave of them."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import bucketfeed as bf

SAMPLES = 128


def payload(number: int) -> bytes:
    return f"sample {number} ".encode() * (1 + number % 7)


def write_raw(folder: Path, samples: int = SAMPLES) -> Path:
    for number in range(samples):
        path = folder / f"class{number % 3}" / f"{number:05}.bin"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(payload(number))
    return folder


def write_tars(folder: Path, samples: int = SAMPLES, per_shard: int = 20) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for first in range(0, samples, per_shard):
        with tarfile.open(folder / f"shard-{first:05}.tar", "w") as tar:
            for number in range(first, min(first + per_shard, samples)):
                for field, data in (("bin", payload(number)), ("cls", str(number % 3).encode())):
                    member = tarfile.TarInfo(f"{number:05}.{field}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
    return folder


def keys(loader: bf.Loader) -> list[list[str]]:
    """One epoch's sample keys, batch by batch, by base name."""
    return [[key.rsplit("/", 1)[-1] for key in batch["__key__"]] for batch in loader]


def flat(batches: list[list[str]]) -> list[str]:
    return [key for batch in batches for key in batch]
