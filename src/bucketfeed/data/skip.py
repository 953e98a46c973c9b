"""Samples that can't be parsed or decoded and are left out: counted, the first few told of, up to a limit."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from bucketfeed.errors import DecodeError
from bucketfeed.store.process import PerProcess

_log = logging.getLogger(__name__)

TOLD = 5  # failures that are logged, and whose lines are looked up


@dataclass(frozen=True, slots=True)
class Failure:
    """A sample that is left out, and the whole text of its error."""

    sample: int
    text: str


class Skips:
    """Counts what was left out in one process.

    The limit is on different samples: one that fails in every epoch counts once against it.

    Attributes:
        count: how often a sample was left out.
    """

    def __init__(self, max_errors: int) -> None:
        self.max_errors = max_errors
        self.count = 0
        self._samples: set[int] = set()
        self._lock = PerProcess(threading.Lock)

    def add(self, failures: Sequence[Failure]) -> None:
        """Count `failures` and log the first few. Raises `DecodeError` beyond the limit."""
        for failure in failures:
            with self._lock.get():
                self.count += 1
                new = failure.sample not in self._samples
                self._samples.add(failure.sample)
                number = len(self._samples)
            if number > self.max_errors:
                raise DecodeError(
                    f"{number} samples failed, and max_errors is {self.max_errors}; mend the data or raise the limit. "
                    f"The last one: {failure.text}"
                )
            if new and number <= TOLD:
                more = "; others are counted only, see stats().skipped" if number == TOLD else ""
                _log.warning("left out sample %d: %s%s", failure.sample, failure.text, more)
