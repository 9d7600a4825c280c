"""Distinguish disruptions of Batch jobs (AWS took a machine away) from failures of the job itself.

The status reason of a disrupted job or of one of its nodes is ``Host EC2 (instance i-...) terminated``
(AWS Batch user guide, "Automated job retries"), for reclaimed spot instances and for broken machines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from decorators._metaflow import WaitedJob
from decorators.backends.interface import GangEnd, Loss

_HOST = "Host EC2"
_AT_ONCE = 100  # maximum number of jobs per DescribeJobs call (API reference)


def lost(job: WaitedJob, read_gang_end: Callable[[], GangEnd | None]) -> Loss | None:  # noqa: ARG001
    """Return the machines that a failed job lost; None if the job failed by itself."""
    lost_nodes = {reason.rstrip("."): name for name, reason in _reasons(job) if reason.startswith(_HOST)}
    return (
        Loss(lines=tuple(f"{name}: {reason}" for reason, name in lost_nodes.items())) if lost_nodes else None
    )


def _reasons(job: WaitedJob) -> Iterator[tuple[str, str]]:
    """Yield (name, status reason) of the job and, for a multi-node job, of each node."""
    yield job.what, str(job.info.get("statusReason") or "")
    nodes = int((job.info.get("nodeProperties") or {}).get("numNodes") or 1)
    names = [f"{job.name}#{node}" for node in range(nodes)] if nodes > 1 else []
    for first in range(0, len(names), _AT_ONCE):
        for record in job.client.describe_jobs(jobs=names[first : first + _AT_ONCE])["jobs"]:
            yield f"node {record['jobId']}", str(record.get("statusReason") or "")
