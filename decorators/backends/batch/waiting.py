"""Reasons why a Batch job has not started: the job's status reason, or a problem of its queue."""

from __future__ import annotations

from typing import Any

from decorators._metaflow import WaitedJob
from decorators.backends.batch import aws
from decorators.backends.interface import STARTED, PermanentFailure, WaitState

WAITING = ("SUBMITTED", "PENDING", "RUNNABLE", "STARTING")
_FIX = PermanentFailure(
    kind="misconfiguration",
    grace_period_s=600,  # Batch clears the reason once an administrator has fixed the cause
    advice="See https://docs.aws.amazon.com/batch/latest/userguide/job_stuck_in_runnable.html",
)


def wait_state(job: WaitedJob) -> WaitState:
    """Return whether the job has started, from the latest state that Metaflow queried.

    Queries the queue only if the job has no status reason.
    """
    status = str(job.info.get("status", ""))
    if status not in WAITING:
        return STARTED
    reason = str(job.info.get("statusReason") or "")
    if reason:
        return WaitState(
            pending=True,
            reason=f"{status}: {reason}",
            permanent_failure=_FIX if reason.startswith("MISCONFIGURATION") else None,
        )
    return WaitState(pending=True, reason=_of_queue(job.client, str(job.info.get("jobQueue") or "")))


def terminate_job(job: WaitedJob) -> None:
    """Terminate the job, which also removes it from the queue."""
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        job.client.terminate_job(jobId=job.name, reason="the process that waited for it has given up")
    except (BotoCoreError, ClientError) as error:
        job.report_error(f"{job.what} cannot be terminated: {error}")


def _of_queue(client: Any, queue: str) -> str:
    """Return the problem of the queue or its compute environments; empty if none is known."""
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
