"""The stores that everything must work on alike."""

from __future__ import annotations

import os
from typing import TypeAlias

import pytest

from bucketfeed.testing.gcs import GcsBucket
from bucketfeed.testing.moto import MotoBucket

# Where tests open gs:// by fsspec itself: gcsfs would ask by gRPC what kind of bucket the emulator has, a minute each.
os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"

Bucket: TypeAlias = MotoBucket | GcsBucket
_FIXTURES = {"s3": "moto_bucket", "gs": "gcs_bucket"}


@pytest.fixture(params=_FIXTURES)
def bucket(request: pytest.FixtureRequest) -> Bucket:
    """An empty bucket, once of each store, with `url`, `storage_options`, `put(key, data)` and `delete(key)`."""
    found: Bucket = request.getfixturevalue(_FIXTURES[request.param])
    return found
