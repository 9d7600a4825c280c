"""Suites of runs, one per question, each with a separate result file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from benchmarks.gpu_speed.cases import (
    EAGER,
    ON_GPU,
    OURS,
    RECOMPUTED,
    TINY,
    Case,
    Run,
    Scale,
    in_order,
)
from benchmarks.gpu_speed.predicted import plan_of
from estimator import models
from estimator.errors import UserError
from estimator.job import Machine, Target
from estimator.plan import GIB, MIB
from estimator.vocabulary import LaunchedMethod, Task

Probe = Literal["limit", "equality"]
SMALL_MODELS = ("smollm2-135m", "smollm2-360m", "llama-3.2-1b")
TASK_ENGINES: Mapping[Task, str] = {
    "dpo": "fsdp2",
    "orpo": "fsdp2",
    "kto": "fsdp2",
    "reward": "fsdp2",
    "grpo": "trl",
}
METHODS: tuple[LaunchedMethod, ...] = ("lora", "full")
LENGTH_STEP = 4096  # resolution of the longest planned sequence
NEIGHBORS = (1.0, 1.25, 0.75, 1.5)  # of the longest planned sequence, in the order of the runs
# For dry runs on machines without a GPU; memory as nvidia-smi shows it
H100 = Target(
    machine=Machine(
        gpus=(("NVIDIA H100 80GB HBM3", 81559 * MIB),),
        cpu_cores=16,
        ram_bytes=128 * GIB,
        disk_free_bytes=64 * GIB,
    )
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Suite:
    """Runs of one call, their scale, and what is probed before them."""

    title: str  # of the page, before the name of the card
    scale: Scale
    runs: tuple[Run, ...]
    probes: tuple[Probe, ...] = ("limit",)


def speed(scale: Scale, _target: Target) -> Suite:
    """Every engine and peer on models of 8 and 1.7 billion parameters."""
    return Suite(
        title="Training speed, compared with other trainers,",
        scale=scale,
        runs=tuple(in_order(scale)),
        probes=("limit", "equality"),
    )


def small(scale: Scale, _target: Target) -> Suite:
    """One micro batch per step on small models, where the host's kernel launches limit the speed."""
    tiny = scale is TINY
    scale = replace(
        scale,
        models=scale.models if tiny else SMALL_MODELS,
        tokens=scale.seq_lens[0],
        accumulation=1,
        steps=scale.steps if tiny else 30,
        warm_up=scale.warm_up if tiny else 10,
    )
    cases = [
        Case(model=model, method=method, seq_len=scale.seq_lens[0])
        for model in scale.models
        for method in METHODS
    ]
    engines = (OURS[0], EAGER, "deepspeed", "torchtune")
    runs = tuple(Run(case=case, engine=engine) for engine in engines for case in cases)
    return Suite(title="Small models, one micro batch per step,", scale=scale, runs=runs)


def recompute(scale: Scale, _target: Target) -> Suite:
    """Selective, full and half activation checkpointing on the largest model."""
    scale = replace(scale, models=scale.models[:1], seq_lens=scale.seq_lens[:1])
    cases = [Case(model=scale.models[0], method=method, seq_len=scale.seq_lens[0]) for method in METHODS]
    runs = tuple(Run(case=case, engine=engine) for case in cases for engine in RECOMPUTED)
    return Suite(title="Activation checkpointing", scale=scale, runs=runs)


def tasks(scale: Scale, _target: Target) -> Suite:
    """Preference tasks, reward models and GRPO with LoRA on a 1B model."""
    if scale is not TINY:
        scale = replace(scale, models=("llama-3.2-1b",), seq_lens=(1024,), accumulation=1, steps=20)
    runs = tuple(
        Run(
            case=Case(model=scale.models[0], method="lora", seq_len=scale.seq_lens[0], task=task),
            engine=engine,
        )
        for task, engine in TASK_ENGINES.items()
    )
    return Suite(title="Preference tasks and GRPO", scale=scale, runs=runs)


def longest(scale: Scale, target: Target) -> Suite:
    """Sequences around the longest one that is planned to fit, with activation checkpointing."""
    tiny = scale is TINY
    model = scale.models[0]
    scale = replace(scale, accumulation=1, steps=4, warm_up=1, one_sequence=True)
    runs = []
    for method in METHODS:
        planned = 2 * scale.seq_lens[0] if tiny else longest_planned(model, method, scale, target)
        limit = models.find(model).max_seq_len or planned
        lengths = dict.fromkeys(min(round(planned * part), limit) for part in NEIGHBORS)
        runs += [
            Run(case=Case(model=model, method=method, seq_len=length), engine=OURS[0]) for length in lengths
        ]
    return Suite(title="Longest trainable sequences", scale=scale, runs=tuple(runs))


def longest_planned(model: str, method: LaunchedMethod, scale: Scale, target: Target) -> int:
    """Return the longest sequence, in multiples of ``LENGTH_STEP``, that is planned to fit on one GPU.

    Raises UserError where not even the shortest fits.
    """
    spec = models.find(model)
    low, high = 0, (spec.max_seq_len or LENGTH_STEP) // LENGTH_STEP
    while low < high:
        middle = (low + high + 1) // 2
        run = Run(case=Case(model=model, method=method, seq_len=middle * LENGTH_STEP), engine=OURS[0])
        try:
            fits = plan_of(run, scale, target).prediction.memory.fits
        except UserError:
            fits = False
        low, high = (middle, high) if fits else (low, middle - 1)
    if not low:
        raise UserError(f"{model} {method} is not planned to fit with {LENGTH_STEP:,} tokens.")
    return low * LENGTH_STEP


SUITES: Mapping[str, Callable[[Scale, Target], Suite]] = {
    "speed": speed,
    "small": small,
    "recompute": recompute,
    "tasks": tasks,
    "longest": longest,
}


def suite_of(name: str, *, is_tiny: bool, target: Target) -> Suite:
    """Build a suite; ``target``: machine whose memory limits the longest sequence."""
    return SUITES[name](TINY if is_tiny else ON_GPU, target)
