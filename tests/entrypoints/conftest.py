"""A bucket of tars to start the scripts on."""

from __future__ import annotations

from pathlib import Path

import pytest
from pictures import picture_tar
from scripts import Runs

from bucketfeed.testing.gcs import GcsBucket
from bucketfeed.testing.moto import MotoBucket


@pytest.fixture
def runs(request: pytest.FixtureRequest, tmp_path: Path) -> Runs:
    """128 samples to train on in 4 tars, 21 to test on; in S3 unless the test names another bucket."""
    bucket: MotoBucket | GcsBucket = request.getfixturevalue(getattr(request, "param", "moto_bucket"))
    for shard in range(4):
        bucket.put(f"train/{shard}.tar", picture_tar(range(32 * shard, 32 * (shard + 1)), seed=shard))
    bucket.put("test/0.tar", picture_tar(range(21), seed=99))
    return Runs(bucket, tmp_path)
