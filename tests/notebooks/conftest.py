"""The notebook as it is in the repository."""

from __future__ import annotations

from typing import Any

import nbformat
import pytest
from kernels import NOTEBOOK


@pytest.fixture(scope="session")
def notebook() -> Any:
    return nbformat.read(NOTEBOOK, as_version=4)
