"""One line a minute on how a long epoch goes, for logs: a bar needs a terminal."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from bucketfeed.data.stats import Stats
from bucketfeed.train.lines import pace_line

_log = logging.getLogger(__name__)
SECONDS = 60.0


class Pace:
    """Logs a line at the first batch after each minute; asking between is one look at the clock."""

    def __init__(self, stats: Callable[[], Stats], clock: Callable[[], float] = time.monotonic) -> None:
        self._stats, self._clock = stats, clock
        self._told_at = clock()
        self._before: Stats | None = None

    def batch(self, epoch: int, batches: int, of: int) -> None:
        """Note that `batches` of the epoch's are done."""
        now = self._clock()
        if now - self._told_at < SECONDS:
            return
        self._told_at = now
        before, stats = self._before, self._stats()
        self._before = stats
        seconds = stats.seconds - (before.seconds if before else 0)
        samples = stats.samples - (before.samples if before else 0)
        wait = stats.wait_seconds - (before.wait_seconds if before else 0)
        if seconds > 0:
            _log.info("%s", pace_line(epoch, batches, of, samples / seconds, wait / seconds))
