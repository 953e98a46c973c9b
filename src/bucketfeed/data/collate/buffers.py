"""Memory for batches."""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import torch
from torch.utils.data import get_worker_info

Allocate: TypeAlias = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]

_SMALL_BYTES = 64 << 10  # malloc is as quick


class Buffers:
    """Gives tensors in memory that is used again; call it with (shape, dtype), from any thread.

    A tensor stays valid as long as it, a view of it or an array over it is held; then its memory serves the next one.
    Where there is a GPU the memory is page-locked, and also waits for copies to the GPU that are under way.

    Args:
        pin: False for ordinary memory in any case. Worker processes give ordinary memory: it is copied to the loop's.

    >>> def collate(samples, out):
    ...     images = out((len(samples), 3, 224, 224), torch.uint8)
    ...     for image, sample in zip(images, samples):
    ...         image.copy_(sample["image"])
    ...     return images
    >>> loader = bf.Loader(ds, batch_size=64, collate=functools.partial(collate, out=bf.collate.Buffers()))
    """

    def __init__(self, pin: bool = True) -> None:
        self.pin = pin
        self._free: dict[int, deque[np.ndarray]] = {}  # by size; deques need no lock, which a finalizer must not take

    def __call__(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor of that shape and type, with any content."""
        if self.pin and torch.cuda.is_available() and get_worker_info() is None:
            # torch keeps page-locked memory by itself, and knows which copies from it are not done yet.
            return torch.empty(shape, dtype=dtype, pin_memory=True)
        wanted = math.prod(shape) * dtype.itemsize
        if wanted < _SMALL_BYTES:
            return fresh(shape, dtype)
        size = 1 << (wanted - 1).bit_length()  # few sizes, and pages that no tensor reaches are never touched
        free = self._free.setdefault(size, deque())
        try:
            memory = free.pop()
        except IndexError:
            memory = np.empty(size, np.uint8)
        lent = memory[:wanted]  # lives as long as any tensor over it
        weakref.finalize(lent, free.append, memory).atexit = False
        return torch.from_numpy(lent).view(dtype).reshape(shape)

    def __reduce__(self) -> tuple[type[Buffers], tuple[bool]]:
        return Buffers, (self.pin,)

    def __repr__(self) -> str:
        return f"Buffers(pin={self.pin})"


def fresh(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor in new memory."""
    wanted = math.prod(shape) * dtype.itemsize
    if wanted < _SMALL_BYTES:
        return torch.empty(shape, dtype=dtype)
    # numpy asks for huge pages, torch does not: 64 images of 600 kB took 4 ms to stack in place of 20.
    return torch.from_numpy(np.empty(wanted, np.uint8)).view(dtype).reshape(shape)
