"""Conversion of settings to the planner's Job, and the check which engines support it."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import shutil
from typing import Any

from estimator import models
from estimator.engines import support
from estimator.engines.support import engine_order
from estimator.errors import UserError
from estimator.job import Job
from estimator.models import DiffusionSpec, ModelSpec
from estimator.plan import Plan
from estimator.setup import Answers, LlamaAdapter
from estimator.vocabulary import ENGINES, LAUNCHED_ENGINES, TASKS, LaunchedEngine, RequestedEngine
from launchers import engines
from launchers.dataset.measured import MAX_ROWS
from launchers.dataset.prepared import PreparedInfo
from launchers.scoring.functions import scorer_of
from launchers.settings import Settings


def unsupported(engine: str, settings: Settings, spec: ModelSpec) -> str | None:
    """Return the reason why an engine cannot train this model with these settings, or None if it can.

    The reason is a clause without a final period. Method ``auto`` is checked as the first method that it may
    choose.
    """
    reason = engines.get(engine).unsupported_settings(settings)
    if reason is not None:
        return reason
    values = {
        "engine": engine,
        "method": settings.automatic_methods[0] if settings.method == "auto" else settings.method,
        "rl": settings.rl.model_copy(update={"reward": None}),  # no engine depends on the reward model
    }
    try:
        job = build_job(settings.model_copy(update=values), spec, steps=None)
    except UserError as error:
        return error.problem.removesuffix(".")
    resources = settings.resources
    return support.unsupported_job(job, (resources.nodes or 1) * (resources.gpus or 1))


def first_supported_engine(settings: Settings, spec: ModelSpec) -> LaunchedEngine:
    """Return the first engine that supports these settings; the first in order if none does."""
    order = engine_order(settings.task)
    supported = (name for name in order if unsupported(name, settings, spec) is None)
    return next(supported, order[0])


def installed_engines() -> tuple[LaunchedEngine, ...]:
    """Return the engines whose packages are installed; all engines if none is installed."""
    installed = tuple(
        name
        for name in LAUNCHED_ENGINES
        if all(importlib.util.find_spec(package) is not None for package in engines.needs(name).packages)
    )
    return installed or LAUNCHED_ENGINES


def _engines_with_sharding(
    settings: Settings, names: tuple[LaunchedEngine, ...]
) -> tuple[LaunchedEngine, ...]:
    """Return the engines that support the ``zero`` or ``fsdp`` settings in use; all if none does."""
    sections = [
        name for name in ("zero", "fsdp") if getattr(settings, name) != type(getattr(settings, name))()
    ]
    return tuple(name for name in names if {*sections} <= {ENGINES[name].sharding_options}) or names


def build_job(settings: Settings, spec: ModelSpec, steps: int | None, *, installed: bool = False) -> Job:
    """Build the planner's Job from the settings.

    ``steps``: optimizer steps of the run; None: unknown. ``installed``: engine ``auto`` chooses only among
    installed engines.
    """
    checkpointing = settings.activation_checkpointing
    stage = settings.zero.stage
    engine: RequestedEngine = settings.engine
    if engine == "auto" and settings.engine_options:  # raw options belong to one engine
        engine = first_supported_engine(settings, spec)
    return Job(
        model=_trained_spec(spec, settings),
        method=settings.method,
        methods=settings.automatic_methods,
        engine=engine,
        engines=_engines_with_sharding(settings, installed_engines() if installed else LAUNCHED_ENGINES),
        task=settings.task,
        seq_len=settings.sequence_length(spec),
        global_batch_size=settings.batch_size,
        batch_multiple=settings.batch_multiple if settings.global_batch_size is None else None,
        micro_batch_size=settings.micro_batch_size,
        optimizer=settings.optimizer.name,
        optimizer_in_backward=settings.optimizer.in_backward,
        precision=settings.precision,
        fp8=settings.fp8,
        activation_checkpointing=None if checkpointing == "auto" else checkpointing,
        recompute=None if settings.recompute.what == "auto" else settings.recompute.what,
        recompute_every=None if settings.recompute.every == "auto" else settings.recompute.every,
        lora_rank=settings.lora.rank,
        lora_targets=spec.all_linear if settings.lora.all_linear else tuple(settings.lora.targets),
        rslora=settings.lora.rslora,
        lora_experts=settings.lora.experts,
        quantization=settings.lora.quantization,
        trained_modules=settings.trained_modules,
        new_tokens=len(settings.new_tokens),
        llama_adapter=LlamaAdapter(**settings.adapter.model_dump()),
        variable_length=None if settings.variable_length == "auto" else settings.variable_length,
        longest_first=settings.longest_first,
        expandable_segments=settings.expandable_segments,
        vision=settings.vision,
        zero_stage=None if stage == "auto" else stage,
        fsdp_sharding=None if settings.fsdp.sharding == "auto" else settings.fsdp.sharding,
        replicas=None if settings.fsdp.replicas == "auto" else settings.fsdp.replicas,
        offload="cpu" if "cpu" in (settings.zero.offload, settings.fsdp.offload) else "none",
        steps=steps,
        evaluated_sequences=_evaluated_sequences(settings, steps),
        adapter_only=settings.export.adapter_only,
        **_automatic_fields(settings, installed=installed),
        answers=_answers(settings),
    )


def predict_for_data(plan: Plan, settings: Settings, spec: ModelSpec, data: PreparedInfo) -> Plan:
    """Return the plan with the memory predicted for the longest row of the data.

    Unchanged for rows that are packed or generated, and for images, which all have the planned length.
    """
    task = TASKS[settings.task]
    if data.packed or task.draws_answers or task.images:
        return plan
    from estimator.planning.row_lengths import predict_for_rows  # slow to import, rarely needed

    return predict_for_rows(plan, build_job(settings, spec, steps=None), data.longest_row)


def _automatic_fields(settings: Settings, *, installed: bool) -> dict[str, Any]:
    """Return the Job's fields ``packing``, ``liger`` and ``compile``; None: the planner decides.

    A batch size set by the user excludes packing, because it counts rows, and a packed sequence contains
    several. ``installed``: the job runs on this machine, so what is not installed is excluded: Liger-Kernel,
    or the C compiler that Triton needs (triton 3.6, runtime/build.py).
    """
    compiler = os.environ.get("CC") or any(shutil.which(name) for name in ("gcc", "clang"))
    excluded = {
        "packing": settings.global_batch_size is not None or settings.group_by_length,
        "liger": installed and importlib.util.find_spec("liger_kernel") is None,
        "compile": installed and not compiler,
    }
    values = {name: getattr(settings, name) for name in excluded}
    automatic = {name: False if is_excluded else None for name, is_excluded in excluded.items()}
    return {name: automatic[name] if value == "auto" else value for name, value in values.items()}


def _trained_spec(spec: ModelSpec, settings: Settings) -> ModelSpec:
    """Apply settings that change the model: new tokens; of image models, resolution and trained parts."""
    if isinstance(spec, DiffusionSpec):
        return dataclasses.replace(
            spec,
            resolution=settings.images.resolution or spec.resolution,
            trains_texts=settings.images.text_encoders,
            keeps_average=settings.images.ema_decay is not None,
        )
    return spec.with_tokens(len(settings.new_tokens))


def _evaluated_sequences(settings: Settings, steps: int | None) -> int:
    """Return an upper bound on the held-out sequences that are evaluated during training.

    0 if it is unknown in advance: evaluation by minutes, or a run of unknown length.
    """
    interval = settings.evaluation.every_steps
    if interval is None or steps is None:
        return 0
    return -(-steps // interval) * MAX_ROWS * (2 if settings.trains_on_pairs else 1)


def _answers(settings: Settings) -> Answers:
    """Return the properties of answers that task grpo samples in each step; defaults for other tasks."""
    if not TASKS[settings.task].draws_answers:
        return Answers()
    reward, reward_parameters = settings.rl.reward, 0
    if reward is not None and scorer_of(reward).function is None:
        reward_parameters = models.resolve(reward, online=True).spec.parameters
    return Answers(
        length=settings.rl.max_completion_length,
        compares_reference=None if settings.rl.beta == "auto" else settings.rl.beta > 0,
        reward_parameters=reward_parameters,
    )
