"""A container that is ended as a whole for want of memory says nothing: the process that waits for it does.

What it notes in the run's store lets the next attempt take the plan that needs less
(launchers.run.replanning).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from decorators import _metaflow
from decorators._metaflow import WaitedJob
from decorators.backends.disruptions import Disruptions
from decorators.storage import datastore
from launchers.run.replanning import Replanning, plans_key

_KUBERNETES = "OOMKilled"  # the kubelet's reason of a terminated container
_BATCH = "OutOfMemoryError"  # begins ECS's reason of a stopped container


def endings(pod: dict[str, Any]) -> list[dict[str, Any]]:
    """Return how the containers of a Kubernetes pod ended, from its status."""
    states = [each.get("state") or {} for each in (pod.get("status") or {}).get("containerStatuses") or []]
    return [state["terminated"] for state in states if state.get("terminated")]


def in_pods(pods: Iterable[dict[str, Any]]) -> str | None:
    """The name of a pod that was ended so; None: none was."""
    killed = (pod for pod in pods if any(end.get("reason") == _KUBERNETES for end in endings(pod)))
    return next((f"pod {pod['metadata']['name']}" for pod in killed), None)


def in_batch_job(job: WaitedJob) -> str | None:
    """The id of a Batch job, or of a node of it, that was ended so; None: none was, or it isn't told."""
    from botocore.exceptions import BotoCoreError, ClientError

    nodes = int((job.info.get("nodeProperties") or {}).get("numNodes") or 0)
    records = [job.info]
    if nodes:
        try:
            names = [f"{job.name}#{number}" for number in range(nodes)]
            records += job.client.describe_jobs(jobs=names)["jobs"]
        except (BotoCoreError, ClientError):
            pass  # the job's own record may tell
    for record in records:
        containers = [
            record.get("container"),
            *(each.get("container") for each in record.get("attempts", ())),
        ]
        if any(str((each or {}).get("reason", "")).startswith(_BATCH) for each in containers):
            return f"batch job {record['jobId']}"
    return None


def note(what: str | None) -> None:
    """Keep what has ended the attempt that this process has waited for; None: nothing of this kind."""
    if what is None:
        return
    run, step, attempt = _metaflow.waited_attempt()
    try:
        launch = Disruptions(storage=datastore(), run=run).launch(step, attempt)
        Replanning(storage=datastore(), prefix=plans_key(run)).note_kill(step, launch, what)
    except Exception as error:  # noqa: BLE001  # how the step has ended is to be told all the same
        _metaflow.say(f"{what} ran out of memory, which could not be noted for the next attempt: {error}")
