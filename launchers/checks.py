"""What a run can't be, said before a GPU is asked for: options that don't go together, packages, disks.

Each function raises UserError in two lines, spelled as the user has given it
(:func:`estimator.errors.spelled_as`).
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable
from pathlib import Path

from estimator import models
from estimator.changes import Text
from estimator.errors import Change, UserError
from estimator.formatting import format_bytes
from estimator.models import ModelSpec
from estimator.plan import MIB, Plan
from estimator.planning.support import engine_order
from estimator.vocabulary import ENGINES, LAUNCHED_ENGINES, METHODS, TASKS, LaunchedEngine
from launchers import engines
from launchers.report import trackers
from launchers.scoring.check import check_function
from launchers.scoring.functions import scorer_of
from launchers.scoring.reward_model import check_reward_model
from launchers.settings import Settings


def able_engine(settings: Settings, spec: ModelSpec) -> LaunchedEngine:
    """The first engine that can train the model as these settings say; the first of all where none can."""
    order = engine_order(settings.task)
    able = (name for name in order if engines.get(name).unsupported(settings, spec) is None)
    return next(able, order[0])


def check_supported(
    settings: Settings,
    spec: ModelSpec,
    *,
    otherwise: Text = "See the table of what runs where in docs/methods.md.",
) -> None:
    """Raise UserError for what the engine can't do. ``otherwise``: the advice where no other engine can."""
    trackers.check_installed(settings.tracker)
    if settings.unused:
        name = settings.unused[0]
        raise UserError((Change(name), f" has no part in task {settings.task}."), "Leave it out.")
    if settings.unused_by_method:
        name = settings.unused_by_method[0]
        raise UserError(
            (Change(name), " has no part in ", Change("method", settings.method), "."),
            "Leave it out, or name the method that it belongs to.",
        )
    _check_adapter_only(settings)
    engine = able_engine(settings, spec) if settings.engine == "auto" else settings.engine
    reason = engines.get(engine).unsupported(settings, spec)
    if reason is not None:
        clauses = {name: engines.get(name).unsupported(settings, spec) for name in LAUNCHED_ENGINES}
        able = next((name for name, clause in clauses.items() if clause is None), None)
        asked = [Change("model", settings.model), Change("method", settings.method), Change("engine", engine)]
        problem = (asked[0], " ", asked[1], " ", asked[2], f": {reason}.")
        if able is not None:
            raise UserError(problem, ("Use ", Change("engine", able), "."))
        other, clause = next((name, clause) for name, clause in clauses.items() if name != engine)
        nor = f"Nor can {other}: {clause}. " if clause != reason else ""
        raise UserError(problem, (nor, *((otherwise,) if isinstance(otherwise, str) else otherwise)))


def _check_adapter_only(settings: Settings) -> None:
    """Raise UserError where there is no adapter that could be handed over alone."""
    if not settings.export.adapter_only:
        return
    alone = Change("export.adapter_only", value=True)
    if settings.method != "auto" and not METHODS[settings.method].adapters:
        raise UserError(
            (alone, ": ", Change("method", "full"), " trains no adapter."),
            ("Use ", Change("method", "lora"), ", or leave it out."),
        )
    if settings.method == "qlora" and settings.lora.quantization == "int8":
        raise UserError(
            (alone, ": no library but this one keeps a base in 8 bits as it is trained beside here."),
            ("Use ", Change("lora.quantization", "nf4-double"), ", or leave it out."),
        )


def check_reward(settings: Settings, seq_len: int) -> None:
    """Raise UserError where nothing gives the answers of task grpo a reward, or not a finite number."""
    if not TASKS[settings.task].draws_answers:
        return
    reward = settings.rl.reward
    if reward is None:
        raise UserError(
            "Nothing says how the answers of task grpo are rewarded.",
            (
                "Give a function of your own (",
                Change("rl.reward", "path.py:function"),
                ", called with prompt and answer), or a reward model (",
                Change("rl.reward", "FOLDER"),
                ", what task reward exports).",
            ),
        )
    if settings.rl.answer_tokens(seq_len) >= seq_len:
        raise UserError(
            (
                Change("rl.max_completion_length", settings.rl.max_completion_length),
                f" leaves nothing of seq_len {seq_len} for the prompt.",
            ),
            ("Give ", Change("rl.max_completion_length", max(1, seq_len // 2)), ", or a longer seq_len."),
        )
    if scorer_of(reward).function is not None:
        check_function(reward)
        return
    source = models.locate(reward)
    if source.kind == "folder":
        check_reward_model(Path(source.location), "rl.reward", reward)


def check_layout(settings: Settings, plan: Plan, spec: ModelSpec) -> None:
    """Check again with the plan's nodes and GPUs: some things an engine can't do depend on them."""
    numbers = {"nodes": plan.layout.nodes, "gpus": plan.layout.processes_per_node}
    resources = settings.resources.model_copy(update=numbers)
    fewer = ("Ask for fewer GPUs: ", Change("resources.gpus", 1), ".")
    check_supported(settings.model_copy(update={"resources": resources}), spec, otherwise=fewer)
    last = plan.layout.world_size - 1
    if settings.profile.window is not None and max(settings.profile.ranks) > last:
        raise UserError(
            f"profile.ranks: there is no rank {max(settings.profile.ranks)}, the last is {last}.",
            "Name ranks of the plan, such as profile.ranks=0.",
        )


def installed_engines() -> tuple[LaunchedEngine, ...]:
    """The engines whose packages are here; all where none has them, as none is to be preferred then."""
    found = tuple(
        name
        for name in LAUNCHED_ENGINES
        if all(importlib.util.find_spec(package) is not None for package in engines.needs(name).packages)
    )
    return found or LAUNCHED_ENGINES


def check_installed(engine: str, method: str = "full", *, liger: bool = False) -> None:
    """Raise UserError where the packages of an engine are not here, or those that a method needs there.

    ``liger``: Liger-Kernel's too.
    """
    if liger and importlib.util.find_spec("liger_kernel") is None:
        raise UserError(
            (Change("liger", True), ": the package liger-kernel is not installed."),
            "pip install liger-kernel",
        )
    needed = engines.needs(engine).packages
    if METHODS[method].quantized and ENGINES[engine].runs_loop:
        needed = (*needed, "bitsandbytes")
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(
            f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed: this machine can "
            f"plan, but not train with {engine}.",
            f"pip install 'metaflow-finetune[{'rl' if engine == 'trl' else 'train'}]'",
        )


def check_disks(plan: Plan, free_bytes: Iterable[tuple[str, int]]) -> None:
    """Raise UserError where a disk (its name, what is free on it) is too small for checkpoints and model."""
    needed = plan.request.disk_mib * MIB
    for place, free in free_bytes:
        if free < needed:
            raise UserError(
                f"{place} has {format_bytes(free)} free; the run's weights, checkpoints and model need about "
                f"{format_bytes(needed)} there.",
                "Free some space, or name another place: export FINETUNE_WORK_DIR=/a/larger/disk",
            )


def check_output(settings: Settings) -> None:
    """Raise UserError where the finished model can't be put into its folder on this machine."""
    folder = Path(settings.output_dir).expanduser().absolute()
    existing = next(place for place in (folder, *folder.parents) if place.exists())
    if not (existing.is_dir() and os.access(existing, os.W_OK)):
        why = "may not be written by you" if existing.is_dir() else "is a file"
        raise UserError(
            (Change("output_dir", settings.output_dir), f": {existing} {why}."),
            ("Name another folder: ", Change("output_dir", "FOLDER")),
        )


def check_window(settings: Settings, total_steps: int) -> None:
    """Raise UserError where the profiled window has steps that the run hasn't."""
    window = settings.profile.window
    if window is not None and window[1] > total_steps:
        raise UserError(
            f"profile.steps {settings.profile.steps}: the run has {total_steps:,} steps.",
            f"Name steps of it, such as profile.steps={max(1, total_steps - 3)}:{total_steps}.",
        )


def check_evaluations(settings: Settings, total_steps: int) -> None:
    """Raise UserError where the run ends before it is evaluated for the first time."""
    every = settings.evaluation.every_steps
    if every is not None and every > total_steps:
        raise UserError(
            (Change("evaluation.every_steps", every), f": the run has {total_steps:,} steps."),
            (
                "Give ",
                Change("evaluation.every_steps", max(1, total_steps // 5)),
                " or another part of them.",
            ),
        )
