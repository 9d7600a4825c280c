"""One account on AWS for the tests of a file, all of it on this machine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.batch.lab import Lab
from tests.batch.lab import lab as start
from tests.lab import pods


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A queue, S3 and a metadata service whose ids are long."""
    if reason := pods.missing():
        pytest.skip(reason)
    with start(tmp_path_factory.mktemp("lab")) as started:
        yield started
