"""From the flow's parameters to Settings and a Plan: all that can be known, and refused, before a run."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

from decorators._metaflow import command, compiles_only
from decorators.backends import cluster_name
from estimator import calibration
from estimator.calibration import Calibration
from estimator.errors import Change, UserError, spelled_as
from estimator.hardware import local_machine
from estimator.job import Job, Machine, Target
from estimator.plan import GIB, MIB, Plan
from estimator.planning.planner import CannotFit, plan
from estimator.planning.report import render, render_cannot_fit
from flows import checklist_gate, finetune_artifacts
from flows.checklist_gate import Checked
from launchers import settings, workdir
from launchers.models import weights
from launchers.pipeline import (
    DEFAULT_SEQ_LEN,
    PACKAGES,
    check,
    check_files,
    check_installed,
    check_planned,
    job_of,
    known_steps,
    one_line,
    resolved,
    target_of,
)
from launchers.settings import Settings
from launchers.spelling import SetOptions

__all__ = [
    "DEFAULT_SEQ_LEN",
    "FLAGS",
    "PACKAGES",
    "agreed",
    "flags_of",
    "job_of",
    "one_line",
    "plan_from_parameters",
    "resolved",
    "settings_from",
]

Backend = Literal["local", "kubernetes", "batch"]

# Where each flag of the flow goes in Settings. Anything else is reached by the YAML file and --set.
FLAGS = {
    "model": "model",
    "method": "method",
    "engine": "engine",
    "dataset": "dataset",
    "seq_len": "seq_len",
    "packing": "packing",
    "epochs": "epochs",
    "max_steps": "max_steps",
    "global_batch_size": "global_batch_size",
    "micro_batch_size": "micro_batch_size",
    "lr": "optimizer.lr",
    "precision": "precision",
    "seed": "seed",
    "checkpoint_every": "checkpoint_every",
    "tracker": "tracker",
    "output_dir": "output_dir",
    "nodes": "resources.nodes",
    "gpus": "resources.gpus",
    "gpu": "resources.gpu",
    "instance_type": "resources.instance_type",
    "cloud": "resources.cloud",
    "device": "resources.device",
    "queue": "resources.queue",
    "zone": "resources.zone",
    "pending_timeout": "resources.pending_timeout",
}


class FlowFlags(SetOptions):
    """How the flow takes an option: by its flag where it has one, else by ``--set``."""

    _BY_SETTING: ClassVar = {setting: f"--{flag.replace('_', '-')}" for flag, setting in FLAGS.items()}

    def name(self, option: str) -> str:
        return self._BY_SETTING.get(option, option)

    def words(self, change: Change) -> tuple[str, ...]:
        if change.option == "with":
            return ("--with", str(change.value))
        flag = self._BY_SETTING.get(change.option)
        if flag is None:
            return super().words(change)
        return () if change.value is None else (flag, str(change.value))


FLOW = FlowFlags()


def settings_from(config: Mapping[str, Any], params: Mapping[str, Any]) -> Settings:
    """The settings file's values, the flags laid over them, ``--set`` over both.

    Raises UserError with one line for each wrong value, named as the user wrote it.
    """
    flags: dict[str, Any] = {}
    for flag, name in FLAGS.items():
        value = params.get(flag)
        if value in (None, ""):
            continue
        if flag == "tracker" and isinstance(value, str):
            value = [part.strip() for part in value.split(",")]
        flags[name] = value
    overrides = params.get("overrides") or params.get("set") or ()
    return settings.build(config, overrides, flags)


def plan_from_parameters(params: Mapping[str, Any], backend: Backend) -> Plan:
    """Plan the run that these parameters ask for, or raise UserError before anything is asked for.

    ``params`` are the flow's parameters by name, and under "settings" the settings file's values.
    ``--no-calibration`` leaves out what finished runs have measured, ``--ignore-checklist`` goes on where the
    cluster's newest checklist has failed. ``--plan-only`` prints the plan and ends the program here.
    """
    with spelled_as(FLOW):
        return _plan_from_parameters(params, backend)


def _plan_from_parameters(params: Mapping[str, Any], backend: Backend) -> Plan:
    wanted = settings_from(params.get("settings") or {}, params)
    spec = weights.spec_of(weights.resolve(wanted.model))
    wanted = resolved(wanted, spec)
    check(wanted, spec)
    check_files(wanted)
    job = job_of(wanted, spec, steps=known_steps(wanted))
    target = _target(wanted, backend)
    known, problems = calibration.load() if not params.get("no_calibration") else (None, ())
    for line in problems:
        sys.stderr.write(line + "\n")
    checked = _checklist(backend, ignored=bool(params.get("ignore_checklist")))
    try:
        made = _planned(job, target, known, checked, backend)
    except CannotFit as error:
        raise UserError(render_cannot_fit(error, _command(params), spelling=FLOW)) from None
    check_planned(wanted, made, spec)
    if params.get("plan_only"):
        sys.stdout.write(render(made) + "\n")
        raise SystemExit(0)
    sys.stderr.write(render(made) + "\n\n")  # not to standard output: deployments print JSON there
    if backend == "local":
        check_installed(wanted.engine)
        _check_disk(made)
    else:
        finetune_artifacts.stage(wanted)
    return made


def _command(params: Mapping[str, Any]) -> str:
    """The command that these parameters come from, as the user would give it again."""
    if command() == "run":
        return shlex.join(["python", *sys.argv])
    words = ["python", "flows/finetune_flow.py", "run"]
    return shlex.join([*words, *(["--model", params["model"]] if params.get("model") else [])])


def _checklist(backend: Backend, *, ignored: bool) -> Checked | None:
    """The cluster's newest checklist, where a run is launched. A deployment outlives what it says today."""
    launched = command()
    if launched not in ("run", "resume", "deploy") or compiles_only():
        return None
    cluster = cluster_name.current_cluster() or cluster_name.cluster_name(backend)
    resumes = launched == "resume"
    if resumes:
        ignored = os.environ.get(checklist_gate.IGNORE_VARIABLE, "").lower() in ("1", "true", "yes", "on")
    return checklist_gate.check_newest(
        cluster, backend, ignored=ignored or launched == "deploy", resumes=resumes
    )


def _planned(
    job: Job, target: Target, known: Calibration | None, checked: Checked | None, backend: Backend
) -> Plan:
    """The plan, with what the checklist has measured, and away from the nodes that failed it."""
    made = plan(job, target, calibration=known)
    if checked is None:
        return made
    measured = checked.bandwidth()
    if measured is not None and checked.is_of(made):
        again = plan(job, target, calibration=known, bandwidth=measured)
        if checked.is_of(again):  # else it would be another machine's bandwidth
            reason = checklist_gate.explain_bandwidth(again, measured)
            made = replace(again, why=(*again.why, reason)) if reason else again
    elsewhere = checklist_gate.exclude_nodes(checked, backend)
    for line in elsewhere.lines:
        sys.stderr.write(line + "\n")
    return replace(made, request=replace(made.request, node_labels=elsewhere.labels))


def _check_disk(made: Plan) -> None:
    """Refuse a run on this machine whose checkpoints and model will not fit on its disk."""
    root = workdir.root()
    existing = next(folder for folder in (root, *root.parents) if folder.exists())
    free = shutil.disk_usage(existing).free
    needed = made.request.disk_mib * MIB
    if free < needed:
        raise UserError(
            f"{root} has {free / GIB:.1f} GiB free; the run's weights, checkpoints and model need about "
            f"{needed / GIB:.1f} GiB there.",
            "Free some space, or name another place: export FINETUNE_WORK_DIR=/a/larger/disk",
        )


def agreed(made: Plan | None, wanted: Settings) -> Plan:
    """The plan this run was launched with; UserError where a deployed flow was started for another job."""
    if made is None:
        raise UserError("This run has no plan.", "Start it with `run`, or deploy the flow anew.")
    planned = (made.model, made.method, made.engine)
    asked = (wanted.model, wanted.method, wanted.engine)
    if planned[1:] != asked[1:] or made.layout.global_batch_size != wanted.global_batch_size:
        raise UserError(
            f"This deployment was planned for {planned}, batch {made.layout.global_batch_size}; "
            f"the run asks for {asked}, batch {wanted.global_batch_size}.",
            "Deploy the flow anew with these values: a deployment's resources are fixed.",
        )
    return made


def flags_of(flow: Any) -> dict[str, Any]:
    """A running flow's parameters, as :func:`settings_from` takes them."""
    return {flag: getattr(flow, flag) for flag in FLAGS} | {"overrides": flow.overrides}


def _target(wanted: Settings, backend: Backend) -> Target:
    machine: Machine | None = local_machine.here() if backend == "local" else None
    return target_of(wanted, Target(kind=backend, machine=machine))
