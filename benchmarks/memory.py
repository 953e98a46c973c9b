"""What a large data set costs each further process: its pickled size, and the growth of a forked worker."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def measure(work: Path, samples: int, seconds: float) -> dict[str, Any]:
    """Return the numbers and, under "texts", a sentence for each."""
    raise NotImplementedError
