"""What the fork server loads before it forks workers, which then share it with each other."""

import gc

import bucketfeed.data.workers  # noqa: F401

# The collector writes into every object it looks at, which would give each worker pages of its own.
gc.freeze()
