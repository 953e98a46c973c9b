"""What loading has cost so far, as one frozen record."""

from __future__ import annotations

from dataclasses import dataclass

from bucketfeed.store.ranges import Counts

STALLED = 0.05  # share of the time that a loop waits for data, from which on they are its bottleneck


@dataclass(frozen=True, slots=True)
class Stats:
    """Totals since the data set was opened or the loader was made; seconds and bytes.

    `skipped` is how often a sample was left out by `on_error="skip"`, `bytes_fetched` and `requests` what the store was
    asked for, `bytes_read` what samples were made of, `wait_seconds` the part of `seconds` that the loop stood waiting
    for its next batch.
    """

    samples: int = 0
    skipped: int = 0
    batches: int = 0
    bytes_fetched: int = 0
    bytes_read: int = 0
    requests: int = 0
    cache_hits: int = 0
    cache_misses: int = 0
    retries: int = 0
    wait_seconds: float = 0.0
    seconds: float = 0.0

    @classmethod
    def of(
        cls,
        counts: Counts,
        *,
        samples: int,
        skipped: int = 0,
        batches: int = 0,
        wait_seconds: float = 0.0,
        seconds: float = 0.0,
    ) -> Stats:
        """Join what the readers counted with what the loop saw."""
        return cls(
            samples=samples,
            skipped=skipped,
            batches=batches,
            bytes_fetched=counts.bytes_fetched,
            bytes_read=counts.bytes_read,
            requests=counts.requests,
            cache_hits=counts.cache_hits,
            cache_misses=counts.cache_misses,
            retries=counts.retries,
            wait_seconds=wait_seconds,
            seconds=seconds,
        )

    @property
    def samples_per_second(self) -> float:
        """Samples that the loop took per second; 0 before the first."""
        return self.samples / self.seconds if self.seconds else 0.0

    @property
    def wait_share(self) -> float:
        """Share of the time (0 to 1) that the loop waited for data."""
        return self.wait_seconds / self.seconds if self.seconds else 0.0

    @property
    def hit_rate(self) -> float:
        """Share of cache look-ups (0 to 1) that were answered from disk."""
        looked_up = self.cache_hits + self.cache_misses
        return self.cache_hits / looked_up if looked_up else 0.0
