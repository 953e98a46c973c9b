"""The one retry rule: jittered, growing waits under a bound of tries and of time."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from bucketfeed.errors import BucketfeedError
from bucketfeed.store.faults import Fault, fault_of, our_error, said_by
from bucketfeed.store.ranges import Counter

_log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Retry:
    """How often and how long a failed request is tried again.

    Waits are drawn from 0 to `first_seconds`, then to twice that and so on up to `longest_seconds`, so that many
    readers that failed together do not come back together.
    """

    max_tries: int = 10
    total_seconds: float = 90.0
    first_seconds: float = 0.2
    longest_seconds: float = 15.0

    def call(
        self,
        request: Callable[[], T],
        what: str,
        counter: Counter,
        *,
        etag: str | None = None,
        renew: Callable[[], None] | None = None,
        told: Callable[..., BucketfeedError] = our_error,
    ) -> T:
        """Return what `request` returns, tried again while its failures are of the passing kind.

        A refusal is tried once more after `renew`, which reads the credentials anew. Raises our error for `what`, as
        `told` words it.
        """
        began = time.monotonic()
        tries = 0
        while True:
            tries += 1
            try:
                return request()
            except BucketfeedError:
                raise
            except Exception as e:
                fault = fault_of(e)
                if fault is Fault.REFUSED and renew is not None:
                    renew()
                    renew = None
                    counter.add(retries=1)
                    continue
                wait = random.uniform(0, min(self.longest_seconds, self.first_seconds * 2 ** (tries - 1)))
                late = time.monotonic() - began + wait > self.total_seconds
                if fault is not Fault.PASSING or tries >= self.max_tries or late:
                    raise told(e, what, etag=etag, tries=tries) from e
                if tries == 3:
                    _log.warning("%s: failed %d times, trying on: %s", what, tries, said_by(e))
                counter.add(retries=1)
                time.sleep(wait)
