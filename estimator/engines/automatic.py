"""Automatic choice of packing, Liger-Kernel and torch.compile, for jobs that do not set them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from estimator.engines import fp16, liger, support, varlen
from estimator.hardware import Gpu
from estimator.job import Job
from estimator.vocabulary import (
    ENGINES,
    SHARDINGS,
    Device,
    LaunchedEngine,
    LaunchedPrecision,
    Sharding,
)

Choice = Literal["packing", "liger", "compile"]
CHOICES: tuple[Choice, ...] = get_args(Choice)


@dataclass(frozen=True, kw_only=True, slots=True)
class Proven:
    """A choice that is on by default on GPUs, for the model families of one engine that tests cover."""

    choice: Choice
    engine: LaunchedEngine
    families: tuple[str, ...]
    test: str  # file in tests/ that compares results with and without it


# Families whose blocks torch.compile turns into one graph per kind of block, and whose memory follows
# (estimator/memory/activations/). Not among them: Gemma 4 (more kinds of blocks than torch keeps graphs of
# one function), GPT-OSS (attention in eager code), mixtures of experts, whose compiled products have run on
# CPUs only, and families whose memory was not compared
COMPILED = (
    "llama",
    "mistral",
    "ministral",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma3_text",
    "olmo2",
    "phi",
    "phi3",
    "granite",
    "olmo3",
    "smollm3",
    "ministral3",
    "glm4",
    "exaone4",
    "ernie4_5",
    "hunyuan_v1_dense",
    "seed_oss",
    "gpt_neox",
)
_VARLEN_TEST = "launchers/engines/loop/test_varlen.py"
_LIGER_TEST = "launchers/engines/loop/test_liger.py"
PROVEN = (
    # torchtune 0.6.1 separates packed documents by flex attention; one run on an H200 is in
    # benchmarks/results/on_gpu_1x_nvidia_h200.md
    Proven(
        choice="packing",
        engine="torchtune",
        families=("llama", "mistral", "qwen2"),
        test="launchers/engines/test_engines.py",
    ),
    Proven(choice="packing", engine="deepspeed", families=varlen.FAMILIES, test=_VARLEN_TEST),
    Proven(choice="packing", engine="fsdp2", families=varlen.FAMILIES, test=_VARLEN_TEST),
    Proven(choice="liger", engine="deepspeed", families=liger.FAMILIES, test=_LIGER_TEST),
    Proven(choice="liger", engine="fsdp2", families=liger.FAMILIES, test=_LIGER_TEST),
    Proven(
        choice="compile",
        engine="torchtune",
        families=("llama", "mistral", "qwen2"),
        test="launchers/engines/torchtune/test_recipe.py",
    ),
    Proven(
        choice="compile",
        engine="fsdp2",
        families=COMPILED,
        test="launchers/engines/fsdp2/test_kernels.py",
    ),
    Proven(
        choice="compile",
        engine="deepspeed",
        families=COMPILED,
        test="launchers/engines/loop/test_compiled.py",
    ),
)


FLOAT8 = "fp8 off: its speed has not been measured; --fp8 rowwise runs the blocks' matrix products in float8"
# torchao 0.18, float8/float8_linear.py, matmul_with_hp_or_float8_args.backward; a compiled graph drops them
FLOAT8_FROZEN = "fp8 without compile also computes gradients of the frozen weights: add --compile"


def with_choices(
    job: Job, device: Device, precision: LaunchedPrecision, sharding: Sharding | None = None
) -> Job:
    """Return the job with packing, liger and compile set to True or False.

    Engine and method must not be "auto". ``precision``, ``sharding``: those of the layout. While no sharding
    is chosen (None), compile stays open if it depends on DeepSpeed's ZeRO stage.
    """
    return _decide(job, device, precision, sharding)[0]


def reason(job: Job, device: Device, precision: LaunchedPrecision, sharding: Sharding) -> list[str]:
    """Explain in one line what was decided for a job on GPUs, if anything was left open."""
    objections = _decide(job, device, precision, sharding)[1]
    if not objections or device == "cpu":
        return []
    on = [choice for choice, objection in objections.items() if objection is None]
    parts = [f"{', '.join(on)} on (tested with {job.engine} and {job.model.family} models)"] if on else []
    parts += [f"{choice} off ({objection})" for choice, objection in objections.items() if objection]
    return ["automatic: " + "; ".join(parts)]


def float8_reason(job: Job, gpu: Gpu | None) -> list[str]:
    """Name float8 in one line where GPU, engine and model support it, as no job has it by default.

    With adapters and without torch.compile, name its useless work.
    """
    if job.fp8 != "none" and job.adapters and not job.compile:
        return [FLOAT8_FROZEN]
    possible = (
        gpu is not None
        and gpu.compute_capability is not None
        and job.fp8 == "none"
        and job.compile
        and support.unsupported_gpu(float8 := replace(job, fp8="rowwise"), gpu) is None
        and support.unsupported_job(float8) is None
    )
    return [FLOAT8] if possible else []


def _decide(
    job: Job, device: Device, precision: LaunchedPrecision, sharding: Sharding | None
) -> tuple[Job, dict[Choice, str | None]]:
    """Decide the open choices; return, for each of these, why it is off, or None."""
    objections: dict[Choice, str | None] = {}
    if all(getattr(job, choice) is not None for choice in CHOICES):
        return job, objections
    planned = job
    if ENGINES[job.engine].sharding_options == "zero" and job.zero_stage is None and sharding is not None:
        stage = SHARDINGS[sharding].zero_stage or 0
        planned = replace(job, zero_stage=max(stage, 1) if job.offload == "cpu" else stage)
    stage_open = ENGINES[job.engine].sharding_options == "zero" and planned.zero_stage is None
    for choice in CHOICES:
        if getattr(job, choice) is None and not (choice == "compile" and stage_open and device == "cuda"):
            objections[choice] = _objection(choice, planned, device, precision)
            on = objections[choice] is None
            job, planned = _with(job, choice, on=on), _with(planned, choice, on=on)
    return job, objections


def _with(job: Job, choice: Choice, *, on: bool) -> Job:
    values: dict[str, Any] = {choice: on}
    return replace(job, **values)


def _objection(choice: Choice, job: Job, device: Device, precision: LaunchedPrecision) -> str | None:
    """Return why a choice is off, as a clause; None if it is on."""
    if device == "cpu":
        return "on CPUs"
    if precision == fp16.PRECISION:
        job = replace(job, precision=precision)
    # Later choices that are open are left out here
    alone = replace(job, packing=bool(job.packing), liger=bool(job.liger), compile=bool(job.compile))
    if support.unsupported_job(alone) is not None:
        return "this package does not launch the job"
    objection = support.unsupported_job(_with(alone, choice, on=True))
    if objection is not None:
        return objection.removeprefix(f"{choice}: ")
    if choice == "packing" and (reason := _masked(job, precision)):
        return f"documents would be separated by a dense mask: {reason}"
    if choice == "compile" and not job.packing:
        return "batches vary in length"
    tested = (
        row.choice == choice and row.engine == job.engine and job.model.family in row.families
        for row in PROVEN
    )
    return None if any(tested) else f"not tested with {job.engine} and {job.model.family} models"


def _masked(job: Job, precision: LaunchedPrecision) -> str | None:
    """Return the reason why packed documents need a dense mask, or None if a kernel separates them."""
    if not ENGINES[job.engine].runs_loop:
        return "flex attention is not tested in fp32" if precision == "fp32" else None
    if job.variable_length is False:
        return "variable_length is false"
    return varlen.unsupported(job.model, job.task, job.method, precision)
