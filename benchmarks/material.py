"""Makes the data that every contestant reads: the same samples as tars, as raw objects and as LitData chunks."""

from __future__ import annotations

import importlib.util
import io
import json
import shutil
import tarfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

BUCKET = "bench"
CLASSES = 10


@dataclass(frozen=True)
class Size:
    """How much data: number of samples, bytes of each image, samples of each tar."""

    samples: int = 20_000
    image_bytes: int = 100_000
    samples_per_shard: int = 1_000

    @property
    def needed_bytes(self) -> int:
        """Bytes of all fields of all samples: what a perfect reader would fetch."""
        return self.samples * (self.image_bytes + 1)


def image(index: int, length: int) -> bytes:
    """Return bytes that look like a JPEG from outside: no compression and no cache makes them smaller."""
    body = np.random.default_rng(index).bytes(length - 6)
    return b"\xff\xd8\xff\xe0" + body + b"\xff\xd9"


def label(index: int) -> int:
    """Return the class of a sample, 0 to 9."""
    return index * 7 % CLASSES


def samples(size: Size) -> Iterator[tuple[str, bytes, int]]:
    """Yield (key, image, class) of every sample; the same values in every run."""
    for index in range(size.samples):
        yield f"{index:08d}", image(index, size.image_bytes), label(index)


def make(folder: Path, size: Size) -> None:
    """Fill `folder` (the server's root) with the data of `size`, unless it holds just that already."""
    bucket = folder / BUCKET
    _once(bucket / "tar", size, _write_tars)
    _once(bucket / "raw", size, _write_raw)
    if importlib.util.find_spec("litdata"):
        _once(bucket / "litdata", size, _write_litdata)


def _once(folder: Path, size: Size, write: object) -> None:
    """Call `write(folder, size)` unless it was done before; the note beside the folder is written last."""
    note = folder.with_name(f".{folder.name}.json")
    wanted = json.dumps(asdict(size))
    if note.exists() and note.read_text() == wanted:
        return
    note.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    assert callable(write)
    write(folder, size)
    note.write_text(wanted)


def _write_tars(folder: Path, size: Size) -> None:
    tar: tarfile.TarFile | None = None
    for index, (key, data, number) in enumerate(samples(size)):
        if index % size.samples_per_shard == 0:
            if tar is not None:
                tar.close()
            path = folder / f"{index // size.samples_per_shard:05d}.tar"
            tar = tarfile.open(path, "w", format=tarfile.USTAR_FORMAT)  # noqa: SIM115
        assert tar is not None
        for suffix, content in (("jpg", data), ("cls", str(number).encode())):
            member = tarfile.TarInfo(f"{key}.{suffix}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    if tar is not None:
        tar.close()


def _write_raw(folder: Path, size: Size) -> None:
    for number in range(CLASSES):
        (folder / str(number)).mkdir()
    for key, data, number in samples(size):
        (folder / str(number) / f"{key}.jpg").write_bytes(data)


def _write_litdata(folder: Path, size: Size) -> None:
    import litdata

    litdata.optimize(
        fn=_Sample(size.image_bytes),
        inputs=list(range(size.samples)),
        output_dir=str(folder),
        chunk_bytes="64MB",  # LitData's own advice
        num_workers=2,
        verbose=False,
    )


@dataclass(frozen=True)
class _Sample:
    """What LitData calls for each input; a class, so that it pickles by name."""

    image_bytes: int

    def __call__(self, index: int) -> dict[str, object]:
        return {"key": f"{index:08d}", "jpg": image(index, self.image_bytes), "cls": label(index)}
