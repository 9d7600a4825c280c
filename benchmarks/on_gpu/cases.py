"""Cases to measure: their sizes and their order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Literal

from estimator import models
from estimator.errors import CannotFit, UserError
from estimator.hardware.local_machine import detect
from estimator.job import Job, Machine, Target
from estimator.models import ModelSpec
from estimator.plan import Plan
from estimator.planning import planner
from estimator.vocabulary import LAUNCHED_ENGINES, Device, LaunchedEngine, LaunchedMethod
from launchers.run import preparation
from launchers.run.job import build_job, unsupported
from launchers.settings import Settings, build

Lengths = Literal["varying", "fixed"]
METHODS = ("lora", "full", "qlora")  # most used first
ENGINES = tuple(name for name in LAUNCHED_ENGINES if name != "trl")  # trl generates answers during training
DISK_SHARE = 0.5  # maximum share of the free disk for one model's 16-bit weights
ROOM = 2**50  # bytes; more than any plan needs, so that planning never fails


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """Size of the runs."""

    device: Device
    models: tuple[str, ...]  # names of the model table, smallest first
    seq_len: int
    micro_batch_size: int
    accumulation: int
    steps: int  # optimizer steps of a run
    warm_up: int  # first steps, excluded from the speed
    checkpointing: bool


# A step of an 8B model with eight sequences of 2048 tokens takes about a second on an H100.
# With accumulation, gradients are kept between micro batches, as in most runs.
ON_GPUS = Scale(
    device="cuda",
    models=("llama-3.2-1b", "llama-3.2-3b", "llama-3.1-8b"),
    seq_len=2048,
    micro_batch_size=2,
    accumulation=2,
    steps=12,
    warm_up=3,
    checkpointing=True,
)
ON_CPU = Scale(
    device="cpu",
    models=("tiny-llama",),
    seq_len=256,
    micro_batch_size=2,
    accumulation=2,
    steps=6,
    warm_up=2,
    checkpointing=False,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """Configuration of one training run: model, method, engine, processes, row lengths and switches."""

    model: str
    method: LaunchedMethod
    engine: LaunchedEngine
    processes: int
    lengths: Lengths
    longest_first: bool
    expandable_segments: bool

    @property
    def name(self) -> str:
        """Name of the case in tables and for ``--only``."""
        return f"{self.what}, {self.switches}"

    @property
    def what(self) -> str:
        """Description of model, method, engine and processes."""
        several = f" on {self.processes}" if self.processes > 1 else ""
        return f"{self.model} {self.method} {self.engine}{several}"

    @property
    def switches(self) -> str:
        """Description of the row lengths and the launchers' two switches; packed rows have equal lengths."""
        first = ", longest first" if self.longest_first else ", as drawn"
        lengths = "packed" if self.lengths == "fixed" else f"varying{first}"
        return f"{lengths}, expandable segments {'on' if self.expandable_segments else 'off'}"


# (lengths, longest_first, expandable_segments), the most useful first: the defaults, packed rows,
# both switches off, and each switch alone. On packed rows longest_first has no effect.
_ROUNDS: tuple[tuple[Lengths, bool, bool], ...] = (
    ("varying", True, True),
    ("fixed", True, True),
    ("varying", False, False),
    ("varying", True, False),
    ("varying", False, True),
    ("fixed", True, False),
)


def in_order(scale: Scale, machine: Machine, model: str | None = None) -> list[Case]:
    """List all cases, the most useful first: on one GPU (or process), then on all available ones.

    ``model``: model of all cases. None: for each method, engine and number of processes, the largest of the
    scale's models that is predicted to fit.
    """
    counts = sorted({1, len(machine.gpus) or 1})
    combinations = list(product(counts, ENGINES, METHODS))
    chosen = {
        (count, engine, method): model or _largest(scale, machine, count, engine, method)
        for count, engine, method in combinations
    }
    return [
        Case(
            model=chosen[count, engine, method],
            method=method,  # type: ignore[arg-type]
            engine=engine,
            processes=count,
            lengths=lengths,
            longest_first=first,
            expandable_segments=expandable,
        )
        for lengths, first, expandable in _ROUNDS
        for count, engine, method in combinations
    ]


def _largest(scale: Scale, machine: Machine, count: int, engine: str, method: str) -> str:
    """Return the largest model that is predicted to fit; the smallest one if none is."""
    for name in reversed(scale.models):
        case = Case(
            model=name,
            method=method,  # type: ignore[arg-type]
            engine=engine,  # type: ignore[arg-type]
            processes=count,
            lengths="varying",
            longest_first=True,
            expandable_segments=True,
        )
        spec = models.find(name)
        if 2 * spec.parameters > machine.disk_free_bytes * DISK_SHARE:
            continue
        settings = settings_of(case, scale, Path(name), Path("rows.jsonl"))
        try:
            plan = _plan(settings, spec, machine)
        except UserError:
            continue
        if plan.prediction.memory.fits and not plan.prediction.memory.tight:
            return name
    return scale.models[0]


def _plan(settings: Settings, spec: ModelSpec, machine: Machine) -> Plan:
    job = build_job(settings, spec, settings.max_steps)
    return planner.plan(job, preparation.apply_resources(settings, Target(machine=machine)))


def unsupported_case(case: Case, scale: Scale) -> str | None:
    """Return the engine's reason why it cannot run the case; None if it can."""
    settings = settings_of(case, scale, Path(case.model), Path("rows.jsonl"))
    return unsupported(case.engine, settings, models.find(case.model))


def settings_of(case: Case, scale: Scale, model_dir: Path, dataset: Path) -> Settings:
    """Build a user's settings for the case, without held-out rows and checkpoints."""
    return build(
        {
            "model": str(model_dir),
            "method": case.method,
            "engine": case.engine,
            "dataset": str(dataset),
            "seq_len": scale.seq_len,
            "packing": case.lengths == "fixed",
            "liger": False,
            "compile": False,
            "longest_first": case.longest_first,
            "expandable_segments": case.expandable_segments,
            "max_steps": scale.steps,
            "global_batch_size": scale.micro_batch_size * scale.accumulation * case.processes,
            "micro_batch_size": scale.micro_batch_size,
            "activation_checkpointing": scale.checkpointing,
            "checkpoint_every": scale.steps + 1,
            "evaluation": {"fraction": 0, "generations": 0},
            "resources": {"device": scale.device, "nodes": 1, "gpus": case.processes},
        }
    )


def plan_anyway(job: Job, target: Target, _: object = None) -> Plan:
    """Return a plan for this machine, even if it is predicted not to fit.

    In that case it is planned as if memory were unlimited, for DeepSpeed on several GPUs with ZeRO stage 3;
    the run then tests the prediction.
    """
    try:
        return planner.plan(job, target)
    except CannotFit:
        machine = target.machine or detect()
        roomy = replace(machine, gpus=tuple((name, ROOM) for name, _ in machine.gpus), ram_bytes=ROOM)
        leanest = 3 if job.engine == "deepspeed" and (target.gpus or 1) > 1 else job.zero_stage
        return planner.plan(replace(job, zero_stage=leanest), replace(target, machine=roomy))


def rows_needed(case: Case, scale: Scale) -> int:
    """Return the number of rows: all that the run uses, including the longest; four times as many to pack."""
    rows = scale.steps * scale.micro_batch_size * scale.accumulation * case.processes
    return 4 * rows if case.lengths == "fixed" else rows


def chosen(cases: Sequence[Case], only: str | None) -> list[Case]:
    """Return the cases whose names contain every word of ``only``. Raises UserError if there are none."""
    words = (only or "").split()
    matches = [case for case in cases if all(word in case.name.replace(",", "").split() for word in words)]
    if not matches:
        raise UserError(f"--only {only}: no case has all these words.", f"One case is: {cases[0].name}")
    return matches
