"""Real data for demonstrations and tests: scikit-learn's 1,797 handwritten digits in a mocked S3."""

from __future__ import annotations

import contextlib
import io
import tarfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
from tqdm.auto import tqdm

from bucketfeed.errors import ConfigError
from bucketfeed.testing.moto import MotoBucket, MotoServer

_TEST_EVERY = 5  # each fifth digit is for testing
_PER_SHARD = 200


class Digit(NamedTuple):
    """A picture of a digit."""

    name: str
    part: str
    label: int
    png: bytes


def digits() -> list[Digit]:
    """Return the 1,797 digits: 1,437 in the part "train", 360 in "test"."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as e:
        raise ConfigError("the digits need scikit-learn: pip install scikit-learn") from e
    from PIL import Image

    found = load_digits()
    result = []
    for number, (pixels, label) in enumerate(zip(found.images, found.target, strict=True)):
        png = io.BytesIO()
        Image.fromarray((pixels * 255 / 16).astype(np.uint8)).save(png, "PNG")
        part = "test" if number % _TEST_EVERY == 0 else "train"
        result.append(Digit(f"{number:04}", part, int(label), png.getvalue()))
    return result


def put_digits(bucket: MotoBucket, *, progress: bool = True, only_shards: bool = False) -> None:
    """Write them as objects `digits/<part>/<label>/<name>.png`, and as tars `shards/<part>/<number>.tar`.

    Without the objects, of which there are many, it takes a second.
    """
    pictures = digits()
    objects = {} if only_shards else {f"digits/{d.part}/{d.label}/{d.name}.png": d.png for d in pictures}
    for part in ("train", "test"):
        own = [d for d in pictures if d.part == part]
        for first in range(0, len(own), _PER_SHARD):
            objects[f"shards/{part}/{first // _PER_SHARD:05}.tar"] = _tar(own[first : first + _PER_SHARD])
    with ThreadPoolExecutor(8) as pool:
        puts = pool.map(lambda item: bucket.put(*item), objects.items())
        for _ in tqdm(puts, total=len(objects), desc="writing digits", unit=" objects", disable=not progress):
            pass


@contextlib.contextmanager
def digits_bucket(*, only_shards: bool = False) -> Iterator[MotoBucket]:
    """Give a mocked S3 with a bucket of digits, as long as the `with` block runs; see `put_digits`."""
    with MotoServer() as server:
        bucket = server.create_bucket("digits-demo")
        put_digits(bucket, progress=not only_shards, only_shards=only_shards)
        yield bucket


def digits_options(bucket: MotoBucket) -> list[str]:
    """Return the options of `train.py` that suit the digits, as objects."""
    return [
        *("--data", f"{bucket.url}digits/train/", "--test-data", f"{bucket.url}digits/test/"),
        *("--image-size", "16", "--batch-size", "32", "--lr", "3e-3"),
    ]


def _tar(part: list[Digit]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for digit in part:
            for field, data in (("png", digit.png), ("cls", str(digit.label).encode())):
                member = tarfile.TarInfo(f"{digit.name}.{field}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    return out.getvalue()
