"""``finetune run`` command of a plan."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from estimator.engines import automatic
from estimator.hardware import VARIABLE
from estimator.hardware.cluster.taints import toleration_option
from estimator.job import DEFAULT_BATCH
from estimator.option_names import option_arguments
from estimator.planning.job_settings import changed_settings
from estimator.planning.obstacles import taints_of
from estimator.vocabulary import TASKS

if TYPE_CHECKING:
    from estimator.hardware.cluster import Cluster
    from estimator.job import Job
    from estimator.plan import Plan

FLOW = ("finetune", "run")
NAMESPACE_VARIABLE = "METAFLOW_KUBERNETES_NAMESPACE"  # of Metaflow's configuration
DEFAULT_NAMESPACE = "default"  # Metaflow's


def run_command(
    plan: Plan,
    job: Job,
    model: str,
    cluster: Cluster | None,
    *,
    namespace: str | None = None,
    hardware_file: Path | None = None,
) -> str:
    """Return the shell command that launches this plan, or a sentence with the reason if no engine runs it.

    ``model``: as named by the user; ``cluster``: for tolerations of its taints, None if none are needed;
    ``namespace`` and ``hardware_file``: if set by the user.
    """
    if plan.planned_only is not None:
        return f"No command runs this plan: {plan.planned_only}."
    taints = taints_of(plan, cluster) if cluster is not None else ()
    arguments = [*FLOW]
    if plan.target != "local":
        arguments += shlex.split(toleration_option(taints)) if taints else ("--with", "kubernetes")
    arguments += ["--model", model, "--method", plan.method, "--engine", plan.engine]
    arguments += ["--nodes", str(plan.request.nodes)]
    if plan.layout.device == "cpu":
        arguments += ["--device", "cpu"]
    else:
        arguments += ["--gpus", str(plan.request.gpus_per_node)]
        arguments += () if plan.target == "local" else _machine(plan)
    arguments += [
        argument for name, value in _settings(plan, job) for argument in option_arguments(name, value)
    ]
    variables = {NAMESPACE_VARIABLE: namespace, VARIABLE: hardware_file and str(hardware_file)}
    assignments = [f"{name}={shlex.quote(value)} " for name, value in variables.items() if value]
    return "".join(assignments) + shlex.join(arguments)


def _machine(plan: Plan) -> tuple[str, str]:
    """Return the option for the instance type, or for the GPU if nodes have no label of their type."""
    kind, gpu = plan.request.instance_type, plan.request.gpu_type or ""
    return ("--instance-type", kind) if kind and " " not in kind else ("--gpu", gpu)


def _explicit_choices(plan: Plan, job: Job) -> Iterator[tuple[str, object]]:
    """Yield packing, compile and liger of the plan if they differ from the decisions of the run."""
    decided = replace(job, engine=plan.engine, method=plan.method)  # type: ignore[arg-type]
    default = replace(decided, packing=None, liger=None, compile=None)
    if plan.layout.global_batch_size != DEFAULT_BATCH:
        default = replace(default, packing=False)  # the command names the batch, in rows
    layout = plan.layout
    decided, default = (
        automatic.with_choices(each, layout.device, layout.precision, layout.sharding)
        for each in (decided, default)
    )
    for choice in automatic.CHOICES:
        if getattr(decided, choice) != getattr(default, choice):
            yield choice, getattr(decided, choice)


def _settings(plan: Plan, job: Job) -> Iterator[tuple[str, object]]:
    """Yield the settings with which ``finetune run`` makes this plan, if they differ from the defaults."""
    yield from changed_settings(replace(job, method=plan.method, engine=plan.engine))  # type: ignore[arg-type]
    if plan.layout.global_batch_size != DEFAULT_BATCH:
        yield "global_batch_size", plan.layout.global_batch_size
    yield from _explicit_choices(plan, job)
    if TASKS[job.task].draws_answers:
        yield "rl.reward", "my_rewards.py:reward"
    if plan.prediction.memory.tight:
        yield "resources.tight", True
