"""Plan from a flow's parameters, with all checks that are possible before a run."""

from __future__ import annotations

import functools
import os
import shlex
import shutil
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from decorators._metaflow import Backend, command, compiles_only, local_datastore, resumed_artifact
from decorators.backends import cluster_name, destination
from estimator import hardware
from estimator.calibration import Calibration
from estimator.errors import UserError, impossible_paths_refused
from estimator.hardware import local_machine
from estimator.job import Job, Target
from estimator.option_names import option_name
from estimator.plan import Plan
from estimator.planning import obstacles, planner
from estimator.planning.goals import ATTEMPTS, Goals
from estimator.planning.places import WAIT_PREFIX
from estimator.planning.planner import CannotFit
from estimator.planning.report import render
from estimator.planning.summary import MORE, render_cannot_fit, render_summary
from estimator.terminal import print
from flows.commands.flow_commands import command_line
from flows.finetune import artifacts, flags, harness, rejection_plan, scorers
from launchers.base import workdir
from launchers.harness import tasks
from launchers.results import hub_push
from launchers.run import checks, preparation
from launchers.settings import Settings
from launchers.settings.sections import Resources

if TYPE_CHECKING:
    from flows.cluster_check.gate import Checked

# Settings that only a run on Kubernetes or AWS Batch uses
OF_CLUSTERS = (
    *("resources.spot", "resources.interruption_rate", "resources.from_catalogue", "resources.capacity"),
    *("resources.queue", "resources.queue_system", "resources.priority", "resources.priority_class"),
    *("resources.zone", "resources.fabric", "resources.pod_template", "resources.pending_timeout"),
    "resources.max_disruptions",
)


@impossible_paths_refused()
def plan_from_parameters(params: Mapping[str, Any], backend: Backend) -> Plan:
    """Plan the run that these parameters describe. Raises UserError before any resource is requested.

    ``params`` are the flow's parameters by name, and under "settings" the settings file's values.
    ``--no-calibration`` ignores measurements of finished runs, ``--ignore-checklist`` continues although the
    cluster's newest checklist failed. ``--plan-only`` prints the plan and exits.
    """
    settings = flags.settings_from(params.get("settings") or {}, params)
    _check_options(params, backend)
    machine = local_machine.detect() if backend == "local" else None
    rejection = rejection_plan.check(settings) if "score" in params else None
    try:
        run = preparation.plan_run(
            rejection.trained if rejection else settings,
            Target(kind=backend, machine=machine),
            calibrated=not params.get("no_calibration"),
            choose=functools.partial(
                _choose_plan, backend=backend, settings=settings, ignored=bool(params.get("ignore_checklist"))
            ),
        )
    except CannotFit as error:
        raise UserError(render_cannot_fit(error, _command(params))) from None
    if rejection:
        run = replace(run, plan=rejection.planned(run))
    if run.plan.prediction.price_source and run.plan.request.instance_type:
        print(f"{hardware.old_prices([run.plan.request.instance_type])}\n".lstrip(), end="", file=sys.stderr)
    text = render(run.plan) if params.get("verbose") else render_summary(run.plan)
    if rejection:
        text += f"\n\n{rejection.text(run.plan)}"
    if params.get("plan_only"):
        print(text if params.get("verbose") else f"{text}\n\n{MORE}")
        raise SystemExit(0)
    print(text + "\n", file=sys.stderr)  # not to standard output, where deployments print JSON
    hub_push.check(run.settings, must_reach=backend == "local")
    if backend == "local":
        used_settings = run.settings
        checks.check_installed(used_settings.engine, used_settings.method, liger=used_settings.liger)
        tasks.check_installed(used_settings)
        _check_disks(run.plan)
        checks.check_output(used_settings)
        artifacts.carry(run.model)
    else:
        model, staged = artifacts.stage(run.settings, run.model)
        scorer = scorers.stage_scorer(settings.rejection.score if rejection else settings.rl.reward)
        artifacts.carry(model, staged | scorer | harness.stage_tasks(run.settings))
    return run.plan


def _check_options(params: Mapping[str, Any], backend: Backend) -> None:
    """Raise UserError for an option of this command line that this flow, or this machine, does not use."""
    typed = {argument.partition("=")[0] for argument in flags.original_arguments or sys.argv[1:]}
    overrides = [override.partition("=")[0].strip() for override in flags.overrides_of(params)]
    other_flow = next((name for name in overrides if name.startswith("rejection.")), None)
    if other_flow is not None and "score" not in params:
        raise UserError(
            f"{option_name(other_flow)} applies to rejection sampling only.",
            "Use `finetune flow rejection run`, or remove it.",
        )
    option = next((option_name(name) for name in OF_CLUSTERS if option_name(name) in typed), None)
    if option is not None and backend == "local" and command() == "run":
        raise UserError(
            f"{option} has no effect on this machine.",
            "Remove it, or use a cluster: --with kubernetes or --with batch.",
        )


def _command(params: Mapping[str, Any]) -> str:
    """Return the user's command that these parameters come from."""
    if command() == "run":
        return command_line(sys.argv[0], flags.original_arguments or sys.argv[1:])
    return shlex.join(["finetune", "run", *(["--model", params["model"]] if params.get("model") else [])])


def _newest_checklist(backend: Backend, *, ignored: bool) -> Checked | None:
    """Return the cluster's newest checklist at launch; None for a deployment, which outlives the result."""
    from flows.cluster_check import gate  # 0.2 s to import, and only who launches a run needs it

    launched = command()
    if launched not in ("run", "resume", "deploy") or compiles_only():
        return None
    cluster = cluster_name.current_cluster() or cluster_name.cluster_name(backend)
    resumes = launched == "resume"
    if resumes:
        ignored = os.environ.get(gate.IGNORE_VARIABLE, "").lower() in ("1", "true", "yes", "on")
    return gate.check_newest(cluster, backend, ignored=ignored or launched == "deploy", resumes=resumes)


def _choose_plan(
    job: Job,
    target: Target,
    corrections: Calibration | None,
    *,
    backend: Backend,
    settings: Settings,
    ignored: bool,
) -> Plan:
    """Return the plan for the available machines, with measured bandwidths, without failed nodes."""
    checked = _newest_checklist(backend, ignored=ignored)
    plan, goals = _plan_for_place(job, target, corrections, backend, settings.resources)
    if checked is None:
        return plan
    from flows.cluster_check import gate

    bandwidth = checked.bandwidth()
    if goals is not None and bandwidth is not None and checked.covers(plan):
        replanned = planner.plan(job, target, goals, calibration=corrections, bandwidth=bandwidth)
        if checked.covers(replanned):  # else it would be another machine's bandwidth
            reason = gate.explain_bandwidth(replanned, bandwidth)
            plan = replace(replanned, why=(*replanned.why, reason)) if reason else replanned
    exclusion = gate.exclude_nodes(checked, backend)
    for line in exclusion.lines:
        print(line, file=sys.stderr)
    return replace(plan, request=replace(plan.request, node_labels=exclusion.labels))


def _plan_for_place(
    job: Job, target: Target, corrections: Calibration | None, backend: Backend, resources: Resources
) -> tuple[Plan, Goals | None]:
    """Return the plan, and the goals with the cluster's inventory that it was made with.

    The goals are None for a resumed run, which keeps its plan. Raises UserError, which names the obstacle if
    it is the only one.
    """
    if command() == "resume" and backend != "local":
        previous = resumed_artifact("start", "plan")
        if isinstance(previous, Plan):
            return previous, None
    skipped = "--from-catalogue" if resources.from_catalogue else None
    cluster = (
        None
        if resources.device == "cpu"
        else destination.find_cluster(backend, resources.gpu, skipped=skipped)
    )
    goals = Goals(cluster=cluster.usable if cluster is not None else None)
    if resources.spot and backend != "local":
        goals = _on_spot(goals, backend, resources)
    if cluster is None:
        return planner.plan(job, target, goals, calibration=corrections), goals
    try:
        plan = planner.plan(job, target, goals, calibration=corrections)
    except UserError as error:
        raise obstacles.explain(error, job, target, cluster) from None
    if plan.layout.device == "cpu":
        print(f"No GPUs in {cluster.where}: planned on its CPUs, as with --device cpu.", file=sys.stderr)
    waits = [line for line in plan.why if line.startswith(WAIT_PREFIX)]
    for line in waits:
        print(f"{line}; it gives up after {resources.pending_timeout:g} minutes.", file=sys.stderr)
    return plan, goals


def _on_spot(goals: Goals, backend: Backend, resources: Resources) -> Goals:
    """Return the goals for spot machines. UserError if the backend cannot have them."""
    if backend == "batch" and (resources.nodes or 1) > 1:
        raise UserError(
            f"--nodes {resources.nodes}: AWS Batch runs multi-node jobs on demand only.",
            "Leave --spot out, or request one node.",
        )
    # Without a process that waits for the step and resubmits it, a disruption uses up a retry
    waits = command() != "deploy"
    return replace(
        goals,
        spot=True,
        interruption_rate=resources.interruption_rate,
        max_nodes=1 if backend == "batch" else None,
        max_disruptions=resources.max_disruptions if waits else ATTEMPTS,
    )


def _check_disks(plan: Plan) -> None:
    """Raise UserError if the work folders or the local datastore have too little space, or cannot be used.

    On one disk both share the space that the plan states.
    """
    workdir.check_root()
    work, datastore = _existing(workdir.root()), local_datastore()
    checks.check_disks(plan, [(str(workdir.root()), shutil.disk_usage(work).free)])
    if datastore is not None and (stores := _existing(datastore)).stat().st_dev != work.stat().st_dev:
        disk = (f"The datastore {datastore}", shutil.disk_usage(stores).free)
        checks.check_disks(plan, [disk], "METAFLOW_DATASTORE_SYSROOT_LOCAL")


def _existing(folder: Path) -> Path:
    """Return the folder, or its nearest parent that exists."""
    return next(path for path in (folder, *folder.parents) if path.exists())
