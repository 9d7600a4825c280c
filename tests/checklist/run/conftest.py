from __future__ import annotations

import pytest

from checklist.measurements import Measurements, adapter_of


@pytest.fixture(scope="session", autouse=True)
def _build_the_validator_before_threads_begin() -> None:
    """Build the validator here: node agents are threads, and ast.parse is not thread-safe in Python 3.11."""
    adapter_of(Measurements)
