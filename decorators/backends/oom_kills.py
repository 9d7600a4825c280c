"""Detection of containers that were killed for lack of memory, by the process that waits for them.

A killed container cannot report it. The record in the run's store lets the next attempt use a plan that needs
less memory (launchers.run.replanning).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from decorators import _metaflow, usage
from decorators._metaflow import WaitedJob
from decorators.backends.disruptions import Disruptions
from decorators.storage import datastore
from launchers.run.replanning import Replanning, plans_key

_KUBERNETES = "OOMKilled"  # the kubelet's reason for a terminated container
_BATCH = "OutOfMemoryError"  # prefix of ECS's reason for a stopped container


def container_ends(pod: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the ``terminated`` states of a Kubernetes pod's containers."""
    states = [item.get("state") or {} for item in (pod.get("status") or {}).get("containerStatuses") or []]
    return [state["terminated"] for state in states if state.get("terminated")]


def in_pods(pods: Iterable[dict[str, Any]]) -> str | None:
    """Return the name of a pod that was killed for lack of memory; None if there is none."""
    killed = (pod for pod in pods if any(end.get("reason") == _KUBERNETES for end in container_ends(pod)))
    return next((f"pod {pod['metadata']['name']}" for pod in killed), None)


def in_batch_job(job: WaitedJob) -> str | None:
    """Return the id of the Batch job or node that was killed for lack of memory; None if none is known."""
    from botocore.exceptions import BotoCoreError, ClientError

    nodes = int((job.info.get("nodeProperties") or {}).get("numNodes") or 0)
    records = [job.info]
    if nodes:
        try:
            names = [f"{job.name}#{number}" for number in range(nodes)]
            records += job.client.describe_jobs(jobs=names)["jobs"]
        except (BotoCoreError, ClientError):
            pass  # the job's own record may have the reason
    for record in records:
        containers = [
            record.get("container"),
            *(attempt.get("container") for attempt in record.get("attempts", ())),
        ]
        if any(str((item or {}).get("reason", "")).startswith(_BATCH) for item in containers):
            return f"batch job {record['jobId']}"
    return None


def note(killed: str | None) -> None:
    """Record that the attempt that this process waited for ran out of memory; does nothing for None."""
    if killed is None:
        return
    run, step, attempt = _metaflow.waited_attempt()
    try:
        launch = Disruptions(storage=datastore(), run=run).launch(step, attempt)
        Replanning(storage=datastore(), prefix=plans_key(run)).record_kill(step, launch, killed)
        usage.note_kill(run, step, _metaflow.waited_task(), attempt)
    except Exception as error:  # noqa: BLE001  # the step's failure must still be reported
        _metaflow.print_line(
            f"{killed} ran out of memory, which could not be recorded for the next attempt: {error}"
        )
