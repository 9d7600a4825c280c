"""Machines with GPUs as described by NVML, and finished runs on them, for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.on_gpu import cases
from benchmarks.on_gpu.cases import Case, Scale
from benchmarks.on_gpu.one_run import Outcome
from benchmarks.on_gpu.session import Measured
from estimator import models
from estimator.job import Job, Machine, Target
from estimator.plan import Plan
from launchers.run import preparation
from launchers.run.job import build_job

MIB = 2**20


def machine(gpu: str, mib: int, count: int = 1) -> Machine:
    return Machine(
        gpus=((gpu, mib * MIB),) * count, cpu_cores=16 * count, ram_bytes=2**38, disk_free_bytes=2**40
    )


H200 = machine("NVIDIA H200", 143_771)
L4 = machine("NVIDIA L4", 23_034)
H100S = machine("NVIDIA H100 80GB HBM3", 81_559, 8)


def job_of(case: Case, scale: Scale) -> Job:
    """Return the planned job for the settings of a case, with the model of the catalog."""
    spec = models.find(case.model)
    settings = cases.settings_of(case, scale, Path(case.model), Path("rows.jsonl"))
    return build_job(settings, spec, settings.max_steps)


def plan_of(case: Case, scale: Scale, place: Machine) -> Plan:
    settings = cases.settings_of(case, scale, Path(case.model), Path("rows.jsonl"))
    target = preparation.apply_resources(settings, Target(machine=place))
    return cases.plan_anyway(job_of(case, scale), target)


def ran(case: Case, plan: Plan, **figures: Any) -> Measured:
    """Return a run whose measurements equal its prediction except for ``figures``."""
    memory = plan.prediction.memory
    shown = {
        "live_bytes": memory.live_bytes,
        "reserved_bytes": memory.shows_bytes - 2**30,
        "device_bytes": memory.shows_bytes,
        "device_before_bytes": 0,
        "device_name": plan.request.gpu_type or "",
        "device_total_bytes": memory.capacity_bytes,
        "resident_bytes": 2**31,
        "steps": 12,
        "step_seconds": 2.0,
        "tokens_per_second": 1000.0,
    }
    return Measured(case=case, outcome=Outcome(ended="ran", plan=plan.to_json(), **{**shown, **figures}))
