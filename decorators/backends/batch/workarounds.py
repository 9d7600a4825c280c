"""Workarounds for multi-node steps on AWS Batch with Metaflow 2.19.39.

Metaflow derives the command of the other nodes from the main node's by replacing the task id wherever its
digits occur (https://github.com/Netflix/metaflow/issues/2564). Short ids, as from local metadata or a new
metadata service, also occur elsewhere, for example in the address of the code package; then the nodes fail to
start, and the main node waits for them. :func:`install` replaces the id only in its two places.

At its end the main node waits until the metadata lists the tasks of the other nodes. With local metadata each
container has its own, so that wait would fail: :func:`refuse_local_metadata` raises an error before launch.
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

_INDEX = "$AWS_BATCH_JOB_NODE_INDEX"  # expanded by the node's shell


def refuse_local_metadata(step_request: StepRequest) -> ClusterFacts:
    """Raise UserError for a multi-node step with local metadata. Returns no facts."""
    request = step_request.request
    if request.nodes > 1 and _metaflow.metadata_kind() == "local":
        raise UserError(
            f"A step on {request.nodes} nodes of AWS Batch needs a metadata service; "
            "this run's metadata is local.",
            "Set METAFLOW_SERVICE_URL and METAFLOW_DEFAULT_METADATA=service, or request one node.",
        )
    return ClusterFacts()


def install(on_end: Callable[[list[str]], None] = lambda _: None) -> None:  # noqa: ARG001
    """Install the workarounds and error messages in the process that Metaflow starts for a remote step.

    ``on_end`` is not called: Metaflow itself reports how a Batch job failed.
    """
    _metaflow.on_batch_client(
        lambda client: client.meta.events.register("provide-client-params.batch.SubmitJob", correct)
    )
    _metaflow.explain_batch_errors(explain, lambda job: oom_kills.note(oom_kills.in_batch_job(job)))


def correct(params: dict[str, Any], **_: Any) -> dict[str, Any]:
    """Add tags (user, flow, run) to the parameters of SubmitJob, and correct the other nodes' command."""
    if params.get("tags"):  # only if tagging is configured: without permission to tag, AWS rejects the job
        job_parameters = params["parameters"]
        user, flow, run = (
            str(job_parameters.get(f"metaflow.{name}", "")) for name in ("user", "flow_name", "run_id")
        )
        params["tags"] = {**labels_of(user, flow, run), **params["tags"]}
    overrides = params.get("nodeOverrides", {}).get("nodePropertyOverrides", [])
    if len(overrides) == 2:
        main, other_commands = (override["containerOverrides"]["command"] for override in overrides)
        command = others_command(main[-1], params["parameters"]["metaflow.task_id"])
        if command is not None:
            other_commands[-1] = command
    return params


def others_command(main: str, task: str) -> str | None:
    """Derive the other nodes' command from the main node's; None unless it is as in Metaflow 2.19.39."""
    node_id = f"{task.replace('control-', '')}-node-{_INDEX}"
    command = main
    for prefix, count in ((r"MF_PATHSPEC=\S+/", 1), ("--task-id ", 1)):
        pattern = rf"(?<!\S)({prefix}){re.escape(task)}(?!\S)"
        command, replaced = re.subn(pattern, lambda match: match[1] + node_id, command)
        if replaced != count:
            return None
    command = command.replace("ubf_control", "ubf_task")
    head, split, tail = command.rpartition("--split-index 0")
    return f"{head}--split-index {_INDEX}{tail}" if split else None
