"""Has AWS taken a Batch job's machine away, or has the job failed by itself?

Batch says so in the status reason of the job or of one of its nodes, ``Host EC2 (instance i-...) terminated``
(AWS Batch user guide, "Automated job retries"): of spot machines that are taken back, and of broken ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from decorators._metaflow import WaitedJob
from decorators.backends.interface import LastWords, Loss

_HOST = "Host EC2"
_AT_ONCE = 100  # jobs that DescribeJobs tells of at a time (its API reference)


def lost(job: WaitedJob, last_words: Callable[[], LastWords | None]) -> Loss | None:  # noqa: ARG001
    """The machines that were taken away of a job that has failed; None: it has failed by itself."""
    found = {reason.rstrip("."): name for name, reason in _reasons(job) if reason.startswith(_HOST)}
    return Loss(lines=tuple(f"{name}: {reason}" for reason, name in found.items())) if found else None


def _reasons(job: WaitedJob) -> Iterator[tuple[str, str]]:
    """Yield (name, reason of its end) of the job and, with several nodes, of each node."""
    yield job.what, str(job.info.get("statusReason") or "")
    nodes = int((job.info.get("nodeProperties") or {}).get("numNodes") or 1)
    names = [f"{job.name}#{node}" for node in range(nodes)] if nodes > 1 else []
    for first in range(0, len(names), _AT_ONCE):
        for found in job.client.describe_jobs(jobs=names[first : first + _AT_ONCE])["jobs"]:
            yield f"node {found['jobId']}", str(found.get("statusReason") or "")
