from __future__ import annotations

from collections.abc import Iterator

import pytest
from stacks import account


@pytest.fixture(autouse=True)
def mocked_account() -> Iterator[None]:
    with account():
        yield
