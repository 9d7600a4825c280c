"""The cases: which runs are measured, how large they are, and in which order."""

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
METHODS = ("lora", "full", "qlora")  # in the order of their use
ENGINES = tuple(name for name in LAUNCHED_ENGINES if name != "trl")  # which draws answers as it trains
DISK_SHARE = 0.5  # of what is free: the weights of one model, in 16 bits; there may be others
ROOM = 2**50  # bytes that no plan needs: with so much, everything is planned


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """How large the runs are."""

    device: Device
    models: tuple[str, ...]  # names of the model table, smallest first
    seq_len: int
    micro_batch_size: int
    accumulation: int
    steps: int  # optimizer steps of a run
    warm_up: int  # of them, that don't count for the speed
    checkpointing: bool


# Eight sequences of 2048 tokens a step are a step a second of an 8B model on an H100, and gradients are kept
# while they accumulate, as in most runs.
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
    """One way to train: what, with what, on how many processes, on which lengths, with which switches."""

    model: str
    method: LaunchedMethod
    engine: LaunchedEngine
    processes: int
    lengths: Lengths
    longest_first: bool
    expandable_segments: bool

    @property
    def name(self) -> str:
        """All of it in words, as tables show it and ``--only`` finds it."""
        return f"{self.what}, {self.switches}"

    @property
    def what(self) -> str:
        """Model, method, engine, processes."""
        several = f" on {self.processes}" if self.processes > 1 else ""
        return f"{self.model} {self.method} {self.engine}{several}"

    @property
    def switches(self) -> str:
        """Lengths, and the launchers' two switches; packed rows have no longest one."""
        first = ", longest first" if self.longest_first else ", as drawn"
        lengths = "packed" if self.lengths == "fixed" else f"varying{first}"
        return f"{lengths}, expandable segments {'on' if self.expandable_segments else 'off'}"


# Lengths and switches, the most useful first: what users run by default, packed rows, what it was before, and
# each switch alone. On packed rows longest_first changes nothing.
_ROUNDS: tuple[tuple[Lengths, bool, bool], ...] = (
    ("varying", True, True),
    ("fixed", True, True),
    ("varying", False, False),
    ("varying", True, False),
    ("varying", False, True),
    ("fixed", True, False),
)


def in_order(scale: Scale, machine: Machine, model: str | None = None) -> list[Case]:
    """All cases, the most useful first: on one GPU (or process), then on all that there are.

    ``model`` takes the place of the largest of the scale's models that is planned to fit, by method, engine
    and number of processes.
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
    """The largest model that is planned to fit, or the smallest of all: then it is seen whether that does."""
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
    """Why the case's engine cannot run it, as the engine itself says; None where it can."""
    settings = settings_of(case, scale, Path(case.model), Path("rows.jsonl"))
    return unsupported(case.engine, settings, models.find(case.model))


def settings_of(case: Case, scale: Scale, model_dir: Path, dataset: Path) -> Settings:
    """The settings that a user would give for such a run, without a held-out part and checkpoints."""
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
    """The plan for this machine; where nothing is said to fit, the leanest one as if there were more memory.

    Whether it is true that it doesn't fit is what is measured.
    """
    try:
        return planner.plan(job, target)
    except CannotFit:
        machine = target.machine or detect()
        roomy = replace(machine, gpus=tuple((name, ROOM) for name, _ in machine.gpus), ram_bytes=ROOM)
        leanest = 3 if job.engine == "deepspeed" and (target.gpus or 1) > 1 else job.zero_stage
        return planner.plan(replace(job, zero_stage=leanest), replace(target, machine=roomy))


def rows_needed(case: Case, scale: Scale) -> int:
    """Rows of the dataset: as many as the run takes, so that the longest is among them; more to be packed."""
    rows = scale.steps * scale.micro_batch_size * scale.accumulation * case.processes
    return 4 * rows if case.lengths == "fixed" else rows


def chosen(cases: Sequence[Case], only: str | None) -> list[Case]:
    """The cases whose name has every word of ``only``; raises UserError where none has."""
    words = (only or "").split()
    matches = [case for case in cases if all(word in case.name.replace(",", "").split() for word in words)]
    if not matches:
        raise UserError(f"--only {only}: no case has all these words.", f"One case is: {cases[0].name}")
    return matches
