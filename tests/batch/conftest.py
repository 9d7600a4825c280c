"""An AWS account on this machine, shared by the tests of a file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.batch.lab import Lab
from tests.batch.lab import lab as start
from tests.lab import pods


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A queue, S3 and a metadata service with long task ids."""
    if reason := pods.missing():
        pytest.skip(reason)
    with start(tmp_path_factory.mktemp("lab")) as started:
        yield started
