"""Small pictures of three classes that a network learns at once, in tars: for tests in several folders."""

from __future__ import annotations

import io
import tarfile

import numpy as np
from PIL import Image


def picture_tar(numbers: range, seed: int = 0) -> bytes:
    draw = np.random.default_rng(seed)
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for number in numbers:
            png = io.BytesIO()
            pixels = draw.integers(0, 60, (8, 8, 3)) + 90 * (number % 3)
            Image.fromarray(pixels.astype(np.uint8)).save(png, "PNG")
            for field, data in (("png", png.getvalue()), ("cls", str(number % 3).encode())):
                member = tarfile.TarInfo(f"{number:04}.{field}")
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
    return out.getvalue()
