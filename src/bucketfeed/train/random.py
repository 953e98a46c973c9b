"""The states of all random generators of a rank, to be saved and restored."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def seed_all(seed: int) -> None:
    """Seed Python's, numpy's and torch's generators."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def state() -> dict[str, Any]:
    """Return the states of this rank's generators: plain values and tensors."""
    version, words, gauss = random.getstate()
    legacy: Any = np.random.get_state()
    return {
        "python": [version, list(words), gauss],
        "numpy": [legacy[0], legacy[1].tolist(), *legacy[2:]],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def restore(state: dict[str, Any]) -> None:
    """Set this rank's generators to `state`."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.array(keys, np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
