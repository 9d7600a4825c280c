"""Steps on several nodes of AWS Batch: what Metaflow 2.19.39 gets wrong there, refused or put right.

Metaflow makes the other nodes' command of the main node's by replacing the task's id wherever its digits
occur (https://github.com/Netflix/metaflow/issues/2564). A short id, as Metaflow's local metadata and a new
metadata service hand out, occurs elsewhere too, in the address of the code package for one; the nodes then
fail to start, and the main one waits for them. :func:`install` has the command made from its two places.

The main node also waits, at its end, for the others' tasks to be there in the metadata. With local metadata
each container has its own, and that wait can't end well: :func:`refuse_local_metadata` refuses it beforehand.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from decorators import _metaflow
from decorators.backends import oom_kills
from decorators.backends.batch.errors import explain
from decorators.backends.interface import ClusterFacts, StepRequest
from decorators.backends.job_labels import labels_of
from estimator.errors import UserError

_INDEX = "$AWS_BATCH_JOB_NODE_INDEX"  # for the node's own shell


def refuse_local_metadata(step_request: StepRequest) -> ClusterFacts:
    """Raise UserError for a step whose nodes could not find each other's tasks; return no facts."""
    request = step_request.request
    if request.nodes > 1 and _metaflow.metadata_kind() == "local":
        raise UserError(
            f"A step on {request.nodes} nodes of AWS Batch needs a metadata service; "
            "this run's metadata is local.",
            "Set METAFLOW_SERVICE_URL and METAFLOW_DEFAULT_METADATA=service, or ask for one node.",
        )
    return ClusterFacts()


def install(ended: Callable[[list[str]], None] = lambda _: None) -> None:  # noqa: ARG001
    """For the process that Metaflow starts for a remote step: commands put right, refusals in words.

    ``ended`` hears nothing: Metaflow itself tells how a Batch job has failed.
    """
    _metaflow.on_batch_client(
        lambda client: client.meta.events.register("provide-client-params.batch.SubmitJob", correct)
    )
    _metaflow.put_batch_in_words(explain, lambda job: oom_kills.note(oom_kills.in_batch_job(job)))


def correct(params: dict[str, Any], **_: Any) -> dict[str, Any]:
    """The parameters of SubmitJob with tags of who runs what, and the other nodes' command put right."""
    if params.get("tags"):  # Metaflow has been told to: without the right to tag, AWS refuses the job
        told = params["parameters"]
        user, flow, run = (str(told.get(f"metaflow.{name}", "")) for name in ("user", "flow_name", "run_id"))
        params["tags"] = {**labels_of(user, flow, run), **params["tags"]}
    overrides = params.get("nodeOverrides", {}).get("nodePropertyOverrides", [])
    if len(overrides) == 2:
        main, others = (each["containerOverrides"]["command"] for each in overrides)
        command = others_command(main[-1], params["parameters"]["metaflow.task_id"])
        if command is not None:
            others[-1] = command
    return params


def others_command(main: str, task: str) -> str | None:
    """Derive the other nodes' command from the main node's; None if it is not written as by Metaflow
    2.19.39.
    """
    own = f"{task.replace('control-', '')}-node-{_INDEX}"
    command = main
    for before, count in ((r"MF_PATHSPEC=\S+/", 1), ("--task-id ", 1)):
        pattern = rf"(?<!\S)({before}){re.escape(task)}(?!\S)"
        command, found = re.subn(pattern, lambda match: match[1] + own, command)
        if found != count:
            return None
    command = command.replace("ubf_control", "ubf_task")
    head, split, tail = command.rpartition("--split-index 0")
    return f"{head}--split-index {_INDEX}{tail}" if split else None
