"""Command of this process, and its backend."""

from __future__ import annotations

import os
from typing import Any, Literal

from metaflow._vendor import click
from metaflow.system_context import ExecutionPhase, system_context
from metaflow.unbounded_foreach import UBF_TASK

Backend = Literal["local", "kubernetes", "batch"]  # but the first, names of Metaflow's decorators
Command = Literal["run", "resume", "deploy", "task", "trampoline", "other"]
DEPLOYERS: dict[str, Backend] = {
    "argo-workflows": "kubernetes",
    "airflow": "kubernetes",
    "step-functions": "batch",
}


def run_parameters(flow: type[Any]) -> tuple[set[str], set[str]]:
    """Options of a flow's parameters: those with a value, and switches. Metaflow's command is not loaded."""
    own = [each for _, each in flow._get_parameters() if not each.IS_CONFIG_PARAMETER]
    switches = {f"--{each.name}" for each in own if each.kwargs.get("is_flag")}
    return {f"--{each.name}" for each in own} - switches, switches


def command() -> Command:
    """Return the purpose for which this process was started."""
    words = command_words()
    if not words:
        return "other"
    if system_context.phase == ExecutionPhase.TASK:
        return "task"
    if system_context.phase == ExecutionPhase.TRAMPOLINE:
        return "trampoline"
    if words[0] == "run":
        return "run"
    if words[0] == "resume":
        return "resume"
    if words[0] in DEPLOYERS and "create" in words:
        return "deploy"
    return "other"


def command_words() -> list[str]:
    context = click.get_current_context(silent=True)
    return list(getattr(context.find_root(), "saved_args", None) or []) if context else []


def deployer() -> str | None:
    """The scheduler that the flow is being deployed to, as Metaflow's command calls it; None: it is not."""
    return command_words()[0] if command() == "deploy" else None


def compiles_only() -> bool:
    """Whether a deployment is only written out, for someone else's cluster perhaps."""
    return "--only-json" in command_words()


def in_container() -> bool:
    """Whether this task runs in a Kubernetes pod or a Batch job rather than next to its scheduler."""
    return "METAFLOW_KUBERNETES_WORKLOAD" in os.environ or "AWS_BATCH_JOB_ID" in os.environ


def waits_for_other_nodes() -> bool:
    """Whether this task, once it has ended well, waits for those of all other nodes.

    As Metaflow's main node on Batch does, for ten minutes where one of them is gone.
    """
    return "AWS_BATCH_JOB_ID" in os.environ


def configured_target(backend: Backend) -> dict[str, Any]:
    """Return the target of steps by Metaflow's configuration, named as in ``@kubernetes`` and ``@batch``."""
    from metaflow import metaflow_config as given

    if backend == "kubernetes":
        secrets = str(given.KUBERNETES_IMAGE_PULL_SECRETS or "")
        return {
            "namespace": given.KUBERNETES_NAMESPACE,
            "service_account": given.KUBERNETES_SERVICE_ACCOUNT,
            "image": given.KUBERNETES_CONTAINER_IMAGE,
            "image_pull_secrets": [name.strip() for name in secrets.split(",") if name.strip()],
        }
    if backend == "batch":
        return {
            "queue": given.BATCH_JOB_QUEUE,
            "image": given.BATCH_CONTAINER_IMAGE,
            "iam_role": given.ECS_S3_ACCESS_IAM_ROLE,
        }
    return {}


def metadata_kind() -> str:
    """The metadata provider of the run that this process launches: "local" or "service"."""
    return str(click.get_current_context().find_root().obj.metadata.TYPE)


def local_node_command() -> tuple[str, str]:
    """Two words by which the command line of another node's local task is known.

    A local ``@parallel`` step runs its other nodes as children of the first one's task.
    """
    return "--ubf-context", UBF_TASK
