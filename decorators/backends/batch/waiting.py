"""Reasons why a Batch job has not started: the job's own, or a problem of its queue."""

from __future__ import annotations

from typing import Any

from decorators._metaflow import WaitedJob
from decorators.backends.batch import aws
from decorators.backends.interface import STARTED, Hopeless, WaitState

WAITING = ("SUBMITTED", "PENDING", "RUNNABLE", "STARTING")
_FIX = Hopeless(
    kind="misconfiguration",
    grace_s=600,  # Batch takes the reason back where its administrator has cured it
    advice="https://docs.aws.amazon.com/batch/latest/userguide/job_stuck_in_runnable.html lists the causes.",
)


def wait_state(job: WaitedJob) -> WaitState:
    """Whether the job has started, from what Metaflow has just asked Batch.

    The queue is asked only while the job gives no reason.
    """
    status = str(job.info.get("status", ""))
    if status not in WAITING:
        return STARTED
    reason = str(job.info.get("statusReason") or "")
    if reason:
        return WaitState(
            pending=True,
            reason=f"{status}: {reason}",
            hopeless=_FIX if reason.startswith("MISCONFIGURATION") else None,
        )
    return WaitState(pending=True, reason=_of_queue(job.client, str(job.info.get("jobQueue") or "")))


def terminate_job(job: WaitedJob) -> None:
    """Terminate the job, which also takes it out of the queue."""
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        job.client.terminate_job(jobId=job.name, reason="the process that waited for it has given up")
    except (BotoCoreError, ClientError) as error:
        job.complain(f"{job.what} can't be terminated: {error}")


def _of_queue(client: Any, queue: str) -> str:
    """Return the problem of the queue or its compute environments; empty if there is none or it is
    unknown.
    """
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        queues = aws.queues(client, queue)
        if not queues:
            return ""
        environments = aws.environments(client, queues[0])
    except (BotoCoreError, ClientError):
        return ""
    for item in (*queues, *environments):
        name = item.get("computeEnvironmentName") or item.get("jobQueueName")
        if reason := aws.unusable(item):
            return f"{name} is {reason}"
    return "RUNNABLE: the queue's compute environments have no free machine that is large enough yet"
