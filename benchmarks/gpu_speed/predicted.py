"""Plans of runs: reasons to leave a run out, and predictions for measured runs by today's estimator."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from benchmarks.gpu_speed.cases import TUNE, Run, Scale, settings_of
from benchmarks.on_gpu.cases import plan_anyway
from benchmarks.on_gpu.one_run import Outcome
from estimator import models
from estimator.errors import UserError
from estimator.formatting import format_bytes
from estimator.hardware.local_machine import detect
from estimator.job import Job, Machine, Target
from estimator.models import ModelSpec
from estimator.plan import Plan
from estimator.planning import planner
from launchers.run.job import build_job, unsupported
from launchers.settings import Settings

ROWS = Path("rows.jsonl")  # no plan reads them


def plan_of(run: Run, scale: Scale, target: Target) -> Plan:
    """Plan a run of this package. Raises UserError if it is not supported or does not fit."""
    settings = _settings(run, scale)
    return planner.plan(_job(settings, _spec(run), target), _place(target, scale))


def refusal(run: Run, scale: Scale, target: Target) -> str | None:
    """Return why a run is left out: not supported, or too large even by the smallest prediction; or None."""
    if run.is_peer and run.engine != TUNE:
        return None
    spec = _spec(run)
    settings = _settings(_of_torchtune(run) if run.is_peer else run, scale)
    reason = unsupported(settings.engine, settings, spec)
    if reason is not None or run.is_peer:
        return reason
    try:
        plan_of(run, scale, target)
    except UserError as error:
        assert target.machine is not None
        if not target.machine.gpus:
            return error.problem
        plan = plan_anyway(_job(settings, spec, target), _place(target, scale))
        least, capacity = plan.prediction.memory.needs_range[0], target.machine.gpus[0][1]
        if least > capacity:
            return f"predicted to need at least {format_bytes(least)} of {format_bytes(capacity)}"
    return None


def recomputes(run: Run, scale: Scale, target: Target) -> bool:
    """Return whether torchtune is planned with activation checkpointing for the case of ``run``."""
    try:
        return plan_of(_of_torchtune(run), scale, target).layout.activation_checkpointing
    except UserError:
        return True


def plan_of_today(run: Run, scale: Scale, outcome: Outcome) -> Plan | None:
    """Plan a measured run again, in the layout that was measured and on its GPU.

    None: there was no plan, or today's engine no longer trains in that layout.
    """
    if outcome.plan is None:
        return None
    measured = Plan.from_json(outcome.plan)
    layout = measured.layout
    chosen = {
        "packing": measured.packing,
        "compile": measured.compile,
        "liger": measured.liger,
        "precision": layout.precision,
        "activation_checkpointing": layout.activation_checkpointing,
        "recompute": {"what": layout.recompute, "every": layout.recompute_every},
    }
    settings = Settings.model_validate(_settings(run, scale).model_dump(mode="json") | chosen)
    gpus = ((outcome.device_name, outcome.device_total_bytes),) if outcome.device_total_bytes else ()
    machine = Machine(
        gpus=gpus, cpu_cores=measured.request.cpu, ram_bytes=detect().ram_bytes, disk_free_bytes=2**40
    )
    try:
        target = _place(Target(machine=machine), scale)
        plan = plan_anyway(_job(settings, _spec(run), target), target)
    except UserError:
        return None
    return plan if plan.layout == layout else None


def _spec(run: Run) -> ModelSpec:
    spec = models.find(run.case.model)
    assert isinstance(spec, ModelSpec)
    return spec


def _of_torchtune(run: Run) -> Run:
    return Run(case=run.case, engine="torchtune")


def _settings(run: Run, scale: Scale) -> Settings:
    return settings_of(run, scale, Path(run.case.model), ROWS)


def _job(settings: Settings, spec: ModelSpec, target: Target) -> Job:
    return build_job(settings, spec, settings.max_steps, installed=target.hardware_given)


def _place(target: Target, scale: Scale) -> Target:
    """Return the target with the one process of all runs."""
    return replace(target, nodes=1, gpus=1, device=scale.device)
