"""pytest fixtures for code that reads from a bucket; installed with bucketfeed, loaded by pytest itself."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from bucketfeed.testing.gcs import GcsBucket, GcsServer
    from bucketfeed.testing.moto import MotoBucket, MotoServer


@pytest.fixture(scope="session")
def moto_server() -> Iterator[MotoServer]:
    """Give a mocked S3 on this machine, one for the whole session."""
    from bucketfeed.testing.moto import MotoServer

    with MotoServer() as server:
        yield server


@pytest.fixture
def moto_bucket(moto_server: MotoServer) -> MotoBucket:
    """Give an empty bucket with `url`, `storage_options`, `put(key, data)`, `delete(key)` and boto3's `client`."""
    return moto_server.create_bucket(f"test-{uuid.uuid4().hex[:12]}")


@pytest.fixture(scope="session")
def gcs_server() -> Iterator[GcsServer]:
    """Give an emulated Google Cloud Storage on this machine, one for the whole session."""
    from bucketfeed.testing.gcs import GcsServer

    with GcsServer() as server:
        yield server


@pytest.fixture
def gcs_bucket(gcs_server: GcsServer) -> GcsBucket:
    """Give an empty bucket with `url`, `storage_options`, `put(key, data)` and `delete(key)`."""
    return gcs_server.create_bucket(f"test-{uuid.uuid4().hex[:12]}")
