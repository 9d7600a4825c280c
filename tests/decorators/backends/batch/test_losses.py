"""Lost machines and failures of a job as reported by AWS Batch."""

from __future__ import annotations

from typing import Any

import pytest

from decorators._metaflow import WaitedJob
from decorators.backends.batch.losses import lost

HOST = "Host EC2 (instance i-0abc) terminated."


class _Nodes:
    """DescribeJobs for the nodes of a job, one of which lost its machine; at most 100 per call, as on AWS."""

    def __init__(self, victim: int) -> None:
        self.victim = victim

    def describe_jobs(self, jobs: list[str]) -> dict[str, Any]:
        assert 0 < len(jobs) <= 100
        reasons = {f"j#{self.victim}": HOST}
        return {"jobs": [{"jobId": job, "statusReason": reasons.get(job, "Essential")} for job in jobs]}


def test_the_machine_of_a_single_job_is_named() -> None:
    job = WaitedJob(backend="batch", kind="batch job", name="j", info={"statusReason": HOST})
    loss = lost(job, None)
    assert loss.lines == ("batch job j: Host EC2 (instance i-0abc) terminated",)


@pytest.mark.parametrize("victim", [0, 99, 100, 249])
def test_any_node_of_a_large_job_is_found(victim: int) -> None:
    info = {"statusReason": "Essential container in task exited", "nodeProperties": {"numNodes": 250}}
    job = WaitedJob(backend="batch", kind="batch job", name="j", info=info, client=_Nodes(victim))
    loss = lost(job, None)
    assert loss.lines == (f"node j#{victim}: Host EC2 (instance i-0abc) terminated",)


@pytest.mark.parametrize("reason", ["Essential container in task exited", "Task failed to start", None])
def test_other_reasons_do_not_count_as_a_disruption(reason: str | None) -> None:
    job = WaitedJob(backend="batch", kind="batch job", name="j", info={"statusReason": reason})
    assert lost(job, None) is None
