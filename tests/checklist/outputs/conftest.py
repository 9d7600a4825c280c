"""Results of a faulty and of a healthy cluster, for the outputs."""

from __future__ import annotations

import pytest

from checklist.result import Result
from checklist.verdict import judge
from tests.checklist.clusters import Cluster
from tests.checklist.runs import cpu_run, gpu_run, with_pairs


@pytest.fixture(scope="module")
def failing() -> Result:
    return judge(with_pairs(cpu_run(4), Cluster(nodes=4, transmit={2: 0.25}, receive={2: 0.25})))


@pytest.fixture(scope="module")
def healthy() -> Result:
    return judge(gpu_run())
