"""One cluster for the tests of a file, which takes ten seconds to start."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kubernetes import cluster as kubernetes
from tests.lab import control_plane, pods


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[kubernetes.Cluster]:
    """Two nodes without GPUs, the roles of infra/kubernetes, S3 and a metadata service."""
    if reason := control_plane.missing() or pods.missing():
        pytest.skip(reason)
    with kubernetes.start(tmp_path_factory.mktemp("cluster")) as started:
        yield started
