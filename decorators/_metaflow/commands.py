"""The Metaflow command that this process runs, and its backend."""

from __future__ import annotations

import os
from typing import Any, Literal

from metaflow._vendor import click
from metaflow.parameters import flow_context
from metaflow.system_context import ExecutionPhase, system_context
from metaflow.unbounded_foreach import UBF_TASK

Backend = Literal["local", "kubernetes", "batch"]  # except "local", names of Metaflow's decorators
Command = Literal["run", "resume", "deploy", "task", "trampoline", "other"]
DEPLOYERS: dict[str, Backend] = {
    "argo-workflows": "kubernetes",
    "airflow": "kubernetes",
    "step-functions": "batch",
}


def run_parameters(flow: type[Any]) -> tuple[set[str], set[str]]:
    """Return a flow's parameters as (options with a value, switches), without loading its command."""
    parameters = [parameter for _, parameter in flow._get_parameters() if not parameter.IS_CONFIG_PARAMETER]
    switches = {f"--{parameter.name}" for parameter in parameters if parameter.kwargs.get("is_flag")}
    return {f"--{parameter.name}" for parameter in parameters} - switches, switches


def command_names(flow: type[Any]) -> list[str]:
    """Return the names of the commands of a flow's command line."""
    with flow_context(flow):  # the options of `run` depend on the flow
        from metaflow import cli

    return list(cli.start.list_commands(None))


def command() -> Command:
    """Return the purpose for which this process was started."""
    arguments = command_arguments()
    if not arguments:
        return "other"
    if system_context.phase == ExecutionPhase.TASK:
        return "task"
    if system_context.phase == ExecutionPhase.TRAMPOLINE:
        return "trampoline"
    if arguments[0] == "run":
        return "run"
    if arguments[0] == "resume":
        return "resume"
    if arguments[0] in DEPLOYERS and "create" in arguments:
        return "deploy"
    return "other"


def command_arguments() -> list[str]:
    context = click.get_current_context(silent=True)
    return list(getattr(context.find_root(), "saved_args", None) or []) if context else []


def deployer() -> str | None:
    """Return the scheduler that the flow is being deployed to, by its Metaflow command; None if it is not."""
    return command_arguments()[0] if command() == "deploy" else None


def compiles_only() -> bool:
    """Whether a deployment is only printed (``--only-json``), perhaps for another cluster."""
    return "--only-json" in command_arguments()


def in_container() -> bool:
    """Whether this task runs in a Kubernetes pod or a Batch job rather than next to its scheduler."""
    return "METAFLOW_KUBERNETES_WORKLOAD" in os.environ or "AWS_BATCH_JOB_ID" in os.environ


def waits_for_other_nodes() -> bool:
    """Whether this task, after it succeeds, waits for the tasks of all other nodes.

    Metaflow's main node on Batch does, for up to ten minutes if one of them is lost.
    """
    return "AWS_BATCH_JOB_ID" in os.environ


def configured_target(backend: Backend) -> dict[str, Any]:
    """Return the default target of steps from Metaflow's configuration, by argument names of ``@kubernetes``
    and ``@batch``.
    """
    from metaflow import metaflow_config as config

    if backend == "kubernetes":
        return {
            "namespace": config.KUBERNETES_NAMESPACE,
            "service_account": config.KUBERNETES_SERVICE_ACCOUNT,
            "image": config.KUBERNETES_CONTAINER_IMAGE,
        }
    if backend == "batch":
        return {
            "queue": config.BATCH_JOB_QUEUE,
            "image": config.BATCH_CONTAINER_IMAGE,
            "iam_role": config.ECS_S3_ACCESS_IAM_ROLE,
        }
    return {}


def metadata_kind() -> str:
    """Return the metadata provider of the run that this process launches: "local" or "service"."""
    return str(click.get_current_context().find_root().obj.metadata.TYPE)


def local_node_command() -> tuple[str, str]:
    """Return two command-line arguments that identify the local task of another node.

    In a local run, the task of a ``@parallel`` step's first node starts the other nodes as child processes.
    """
    return "--ubf-context", UBF_TASK
