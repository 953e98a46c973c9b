"""Tars for tests, and both ways to read one."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bucketfeed.formats import tar
from bucketfeed.formats.window import RangeWindow

DATA = Path(__file__).parents[1] / "data" / "tar"

Sample = dict[str, Any]


def archive(members: Iterable[tuple[str, bytes]], format: int = tarfile.GNU_FORMAT) -> bytes:
    """Return a tar of files given as (path, data)."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=format) as out:
        for path, data in members:
            member = tarfile.TarInfo(path)
            member.size = len(data)
            out.addfile(member, io.BytesIO(data))
    return file.getvalue()


def streamed(data: bytes, name: str = "s.tar", step: int = 700) -> list[Sample]:
    """Return the samples as they come from the bytes front to back."""
    return list(tar.iter_tar((data[at : at + step] for at in range(0, len(data), step)), name))


def indexed(data: bytes, name: str = "s.tar", step: int = 700) -> list[Sample]:
    """Return the samples as they are found by scanning the headers, each made from its own range."""
    window = RangeWindow(lambda start, stop: [data[start:stop]], len(data), step=step, hop=step)
    return [tar.sample(data[start:stop], name, start) for start, stop in list(tar.scan(window, name))]


BOTH = [streamed, indexed]
