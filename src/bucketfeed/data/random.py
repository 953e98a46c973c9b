"""Random numbers for decode functions: the same for the same sample of the same epoch, wherever it is decoded."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np


class _Local(threading.local):
    key: tuple[int, int, int] | None = None
    generator: np.random.Generator | None = None
    worker_seed: int | None = None


_local = _Local()


def rng() -> np.random.Generator:
    """Return the random generator of the sample that is being decoded.

    Inside a `Loader` it depends on (seed, epoch, sample) alone: draws differ from sample to sample and from
    epoch to epoch, and come out the same on any number of ranks, workers and threads, and after a resume.
    Under the stock DataLoader it follows torch's seed of the worker. A generator made once in `__init__`,
    or `np.random`, would repeat itself in every worker or change with the threads' timing.

    >>> def flip(sample):
    ...     image = bf.decoders.image(sample["jpg"])
    ...     return image[:, ::-1] if bf.rng().random() < 0.5 else image
    """
    if _local.generator is None:
        if _local.key is not None:
            _local.generator = np.random.Generator(np.random.Philox(np.random.SeedSequence(_local.key)))
        else:
            return _outside_loader()
    return _local.generator


@contextmanager
def sample_rngs(seed: int, epoch: int) -> Iterator[Callable[[int], None]]:
    """Yield a function that makes `rng()` give the generator of a sample for the calling thread, until the end."""

    def begin(sample: int) -> None:
        _local.key, _local.generator = (seed, epoch, sample), None

    try:
        yield begin
    finally:
        _local.key = _local.generator = None


def _outside_loader() -> np.random.Generator:
    import torch

    seed = torch.initial_seed()  # in a DataLoader worker: differs by worker and by epoch
    if _local.worker_seed != seed:
        _local.worker_seed = seed
        _outside.generator = np.random.Generator(np.random.Philox(seed))
    return _outside.generator


class _Outside(threading.local):
    generator: np.random.Generator


_outside = _Outside()
