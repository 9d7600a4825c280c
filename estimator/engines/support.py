"""Limits of the engines that this package runs, each as one clause.

Engine ``auto`` is one of the engines without a reason here, and launchers/engines asks the same functions,
so that a plan and the run of it agree. Engines that are planned only have no reason: nothing is run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from estimator.engines import fp16, grpo, images, liger, trained_parts, varlen, vision
from estimator.engines.grpo import ELSEWHERE
from estimator.errors import UserError
from estimator.hardware import Gpu
from estimator.job import Job
from estimator.models import DiffusionSpec, ModelSpec, untried
from estimator.models.architectures import family_of
from estimator.vocabulary import ENGINES, LAUNCHED_ENGINES, METHODS, OPTIMIZERS, TASKS, LaunchedEngine

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = frozenset({"gate_proj", "up_proj", "down_proj"})
# NF4 keeps one scale for 64 values and quantizes the scales in blocks of 256 (torchao.dtypes.nf4tensor).
NF4_MULTIPLE = 64 * 256
# Fixed in torchtune/models/llama3_1/_position_embeddings.py: low and high frequency factor, original length.
LLAMA3_ROPE = (1.0, 4.0, 8192)
# Minimum compute capability for each float8 recipe of torchao, from the checks of torch._scaled_mm, whose
# rowwise kernels require Hopper
FP8_CAPABILITY = {"tensorwise": (8, 9), "rowwise": (9, 0)}


def offload_fields(*, zero: str, fsdp: str) -> dict[str, Any]:
    """Return the Job's fields ``offload`` and ``engines`` for --zero-offload and --fsdp-offload.

    ``engines``: those that have the requested offload. Raises UserError if both are requested.
    """
    requested = {section: value for section, value in (("zero", zero), ("fsdp", fsdp)) if value != "none"}
    if len(requested) > 1:
        raise UserError("--zero-offload and --fsdp-offload contradict each other.", "Remove one of them.")
    engines = tuple(name for name in LAUNCHED_ENGINES if {*requested} <= {ENGINES[name].sharding_options})
    return {"offload": next(iter(requested.values()), "none"), "engines": engines}


def unsupported(engine: str, job: Job, processes: int = 1) -> str | None:
    """Return the reason why an engine cannot train a job on this many processes, as one clause.

    None if it can, or if it is planned only. The method of ``job`` must be decided; its engine is ignored.
    """
    if engine in LAUNCHED_ENGINES and job.precision == fp16.PRECISION:
        reason = fp16.unsupported(engine, job)
        if reason is not None:
            return reason
    if isinstance(job.model, DiffusionSpec) or TASKS[job.task].images:
        return images.unsupported(engine, job, processes)
    if engine not in LAUNCHED_ENGINES:
        return None
    reason = None
    if job.variable_length and not ENGINES[engine].runs_loop:
        reason = f"variable_length: engine {engine} has its own attention"
    elif ENGINES[engine].runs_loop:
        reason = _loop(engine, job, processes)
    elif engine == "torchtune":
        reason = _torchtune_model(job.model) or _torchtune_training(job, processes)
    elif engine == "trl":
        reason = grpo.unsupported(job)
    return reason or _not_in_record(engine, job)


def _not_in_record(engine: str, job: Job) -> str | None:
    """Reason that an engine's record in estimator/vocabulary.py rules out the training, or None."""
    spec = ENGINES[engine]
    for field, value, supported in (
        ("task", job.task, spec.tasks),
        ("method", job.method, spec.methods),
        ("optimizer", job.optimizer, spec.optimizers),
    ):
        if value not in supported:
            return f"{field} {value}: engine {engine} has {', '.join(supported)} here"
    return None


def unsupported_job(job: Job, processes: int = 1) -> str | None:
    """Return the reason why the engine of a job cannot train it, as one clause; None if it can."""
    return unsupported(job.engine, job, processes)


def planned_only(job: Job, processes: int = 1) -> str | None:
    """Return the reason why this package cannot launch a job on this many processes; None if it can.

    Names the engine that can, if there is one.
    """
    reason = (
        unsupported_job(job, processes)
        if job.engine in LAUNCHED_ENGINES
        else f"engine {job.engine} is planned only"
    )
    if reason is None:
        return None
    engines = [name for name in engine_order(job.task) if unsupported(name, job, processes) is None]
    if engines:
        return f"{reason}; this package can launch it with engine {engines[0]}"
    if job.engine not in LAUNCHED_ENGINES:
        reason = unsupported(_substitute_engine(job), job, processes)
    return f"no engine of this package can train it: {reason}"


def unsupported_gpu(job: Job, gpu: Gpu) -> str | None:
    """Return the reason why a job cannot run on this GPU; None if it can, or if that is unknown."""
    if job.precision.startswith("bf16") and gpu.dtypes and not gpu.bf16:
        return f"--precision {job.precision}: {gpu.name} computes no bf16"
    if job.fp8 == "none" or gpu.compute_capability is None:
        return None
    major, minor = FP8_CAPABILITY[job.fp8]
    capability = tuple(int(part) for part in gpu.compute_capability.split("."))
    if capability >= (major, minor):
        return None
    return (
        f"--fp8: {job.fp8} needs GPUs of compute capability {major}.{minor} or above, and {gpu.name} has "
        f"{gpu.compute_capability}"
    )


def refuse_gpu(job: Job, gpu: Gpu) -> None:
    """Raise UserError if :func:`unsupported_gpu` returns a reason."""
    reason = unsupported_gpu(job, gpu)
    if reason is not None:
        option = reason.split(maxsplit=1)[0].rstrip(":")
        raise UserError(f"{reason}.", f"Leave {option} out, or ask for another GPU, such as H100.")


def jobs_by_engine(job: Job) -> list[Job]:
    """Return the job with each engine that this package runs and that can train it, the simplest first.

    If none can, with FSDP2 (planned only, with the reason). If the user sets an engine, only that one.
    """
    if job.engine != "auto":
        return [job]
    engines = [
        name for name in engine_order(job.task) if name in job.engines and unsupported(name, job) is None
    ]
    return [replace(job, engine=name) for name in engines or [_substitute_engine(job)]]


def with_simplest_engine(job: Job) -> Job:
    """Return the job with engine ``auto`` decided without a comparison: the simplest that can train it."""
    return jobs_by_engine(job)[0]


def _substitute_engine(job: Job) -> LaunchedEngine:
    """Return the engine whose memory and speed represent a job that no engine can train."""
    return "deepspeed" if job.has_zero_options("auto") else "fsdp2"  # ZeRO's options belong to DeepSpeed


def engine_order(task: str) -> Sequence[LaunchedEngine]:
    """Engines in the order that ``auto`` tries them: torchtune takes DPO's log-probabilities in the model's
    type, the loop in fp32.
    """
    return sorted(LAUNCHED_ENGINES, key="torchtune".__eq__) if task == "dpo" else LAUNCHED_ENGINES


def _torchtune_model(model: ModelSpec) -> str | None:
    if model.experts > 1:
        return f"torchtune 0.6.1 has no mixture-of-experts models ({model.name} has {model.experts} experts)"
    if model.family not in ("llama", "mistral", "qwen2"):
        return (
            f"torchtune 0.6.1's builders used here are llama, mistral and qwen2, and {model.name} is "
            f"{model.family}"
        )
    if model.q_dim != model.hidden:
        return (
            f"torchtune 0.6.1 needs heads * head_dim = hidden, and {model.name} has "
            f"{model.heads} * {model.head_dim} and {model.hidden}"
        )
    if model.qkv_bias != (model.family == "qwen2"):
        present = "biases" if model.qkv_bias else "no biases"
        return f"torchtune 0.6.1 cannot build a {model.family} model with {present} on q, k and v"
    if model.o_bias or model.mlp_bias:
        projection = "attention's output" if model.o_bias else "the MLP"
        return f"torchtune 0.6.1 cannot build a {model.family} model with biases on {projection}"
    if model.tied_embeddings and model.family == "mistral":
        return "torchtune 0.6.1 cannot build a mistral model with tied embeddings"
    if model.hidden_act != "silu":
        return f"torchtune 0.6.1 has SiLU in every MLP, and {model.name} has hidden_act {model.hidden_act}"
    if model.attention_dropout:
        return (
            f"torchtune 0.6.1 has no attention dropout here, and {model.name} has attention_dropout "
            f"{model.attention_dropout:g}"
        )
    return _partial_rotation(model) or _torchtune_rope(model)


def _partial_rotation(model: ModelSpec) -> str | None:
    """Return the reason against a model with partial rotary embeddings whose code does not read the
    factor.
    """
    if model.partial_rotary_factor == 1.0 or family_of(model.family).partial_rotary:
        return None
    return (
        f"{model.family} models rotate whole heads, and {model.name} has partial_rotary_factor "
        f"{model.partial_rotary_factor:g}"
    )


def _torchtune_rope(model: ModelSpec) -> str | None:
    kind = model.rope_scaling_type
    if kind is None:
        return None
    if kind != "llama3" or model.family != "llama":
        return f"torchtune 0.6.1 cannot scale the rotary embeddings of a {model.family} model the {kind} way"
    scaling = (model.rope_low_freq_factor, model.rope_high_freq_factor, model.rope_original_max_seq_len)
    if scaling != LLAMA3_ROPE:
        return f"torchtune 0.6.1 scales rotary embeddings with {LLAMA3_ROPE}, and {model.name} has {scaling}"
    return None


def _torchtune_training(job: Job, processes: int) -> str | None:
    model = job.model
    torchtune, method = ENGINES["torchtune"], METHODS[job.method]
    if TASKS[job.task].draws_answers:
        return ELSEWHERE
    if job.task == "dpo" and (not method.low_rank or job.method not in torchtune.methods):
        return "task dpo: torchtune 0.6.1's recipe for full training keeps a second model in memory"
    if job.task not in torchtune.tasks:
        return f"task {job.task}: the torchtune recipes support no preference loss except DPO's"
    if job.task == "dpo" and job.packing:
        return _answers_not_packed(job)
    if job.new_tokens:
        return "new_tokens: torchtune 0.6.1 builds models with their published vocabulary only"
    if job.has_zero_options("torchtune"):
        return "ZeRO needs engine deepspeed"
    if job.has_fsdp_options:
        return "FSDP2's options need engine fsdp2"
    if model.sliding_window and model.sliding_window < job.seq_len:
        return (
            f"torchtune 0.6.1 has no sliding-window attention, and {model.name}'s window of "
            f"{model.sliding_window} is shorter than seq_len {job.seq_len}"
        )
    if job.vision is not None:
        return "vision: the torchtune recipes here train on text only"
    if job.fp8 != "none":
        return _fp8_needs_engine(job)
    if job.liger:
        return "liger: its kernels are for transformers' models, and torchtune has its own"
    if reason := _optimizer_of_torchtune(job, processes):
        return reason
    if job.recomputes_parts:
        return "torchtune recomputes complete blocks here, and all of them"
    if job.precision not in ("auto", *torchtune.precisions):
        return "torchtune 0.6.1 trains in bf16 or in fp32, not in bf16 with fp32 master weights"
    if not method.adapters:
        return None
    if job.method == "dora":
        return "dora: torchtune 0.6.1's DoRA layers are neither loaded nor merged here"
    if method.llama_adapter:
        return f"{job.method}: torchtune 0.6.1 has no LLaMA-Adapter"
    if job.trained_modules:
        return "lora.modules_to_save: torchtune 0.6.1's recipes train adapters only"
    if job.lora_experts:
        return _no_experts(model) or "lora.experts: torchtune 0.6.1's recipes have no such adapters"
    if job.rslora:
        return "lora.rslora: torchtune 0.6.1 scales its adapters by alpha / rank only"
    targets = set(job.lora_targets)
    if not targets & set(ATTENTION):
        return "torchtune 0.6.1's LoRA needs one of q_proj, k_proj, v_proj, o_proj among lora.targets"
    if targets & MLP and not targets >= MLP:
        return "torchtune 0.6.1 puts LoRA on gate_proj, up_proj and down_proj together or on none of them"
    if not method.quantized:
        return None
    if job.quantization != "nf4-double":
        return f"torchtune 0.6.1 supports only nf4-double for qlora, not {job.quantization}"
    return unsupported_shards(model, processes)


def _optimizer_of_torchtune(job: Job, processes: int) -> str | None:
    """Return the reason why torchtune's recipes cannot use the optimizer, in or after the backward pass."""
    name = job.optimizer
    if job.optimizer_in_backward and METHODS[job.method].adapters:
        return (
            f"optimizer.in_backward: torchtune 0.6.1's recipes of {job.method} step after the complete "
            "backward pass"
        )
    if name in ("adamw", "sgd"):
        return None
    if not OPTIMIZERS[name].bitsandbytes:
        return f"optimizer {name}: the torchtune recipes here support AdamW and SGD"
    if not job.optimizer_in_backward:
        return f"optimizer {name}: with torchtune it needs optimizer.in_backward"
    return _sharded_bitsandbytes(name, processes)


def _fp8_needs_engine(job: Job) -> str:
    engines = " or ".join(name for name in LAUNCHED_ENGINES if ENGINES[name].fp8)
    return f"fp8 {job.fp8}: needs engine {engines} here"


def _sharded_bitsandbytes(optimizer: str, processes: int) -> str | None:
    if not OPTIMIZERS[optimizer].bitsandbytes or processes == 1:
        return None
    return f"optimizer {optimizer} of bitsandbytes does not support weights sharded by FSDP2"


def unlaunchable_processes(job: Job, processes: int) -> str | None:
    """Return the reason why a job cannot run on this many processes though it can on one; else None."""
    if job.engine not in LAUNCHED_ENGINES or job.method == "auto" or processes == 1:
        return None
    reason = unsupported_job(job, processes)
    return reason if reason is not None and unsupported_job(job) is None else None


def unsupported_shards(model: ModelSpec, processes: int) -> str | None:
    """Return the reason why NF4 weights cannot be sharded into complete quantization blocks, or None."""
    for name, (rows, columns) in model.linear_shapes.items():
        if rows * columns % (NF4_MULTIPLE * processes) or rows % processes:
            shared = f" for each of {processes} processes" if processes > 1 else ""
            return (
                f"NF4 needs matrices of a multiple of {NF4_MULTIPLE} values{shared}, and {model.name}'s "
                f"{name} is {rows} x {columns}"
            )
    return None


def _loop(engine: str, job: Job, processes: int) -> str | None:
    """Return the reason why the loop over transformers models, or the engine's sharding, cannot train it."""
    model = job.model
    spec, method = ENGINES[engine], METHODS[job.method]
    if job.has_zero_options(engine) and spec.sharding_options != "zero":
        return "ZeRO needs engine deepspeed"
    if job.has_fsdp_options and spec.sharding_options != "fsdp":
        return "FSDP2's options need engine fsdp2"
    if (reason := _loop_model(engine, model) or _task_of_loop(job)) is not None:
        return reason
    if job.vision is not None and (reason := vision.unsupported(job)) is not None:
        return reason
    if job.packing and (packing_reason := family_of(model.family).packing_leak):
        return (
            f"packing: transformers' {model.family} code lets a document attend to earlier ones in its row "
            f"({packing_reason})"
        )
    if method.quantized and model.experts and family_of(model.family).experts_stay_16_bit:
        return f"qlora: experts of {model.family} models stay in 16 bits, and are most of the weights"
    if job.fp8 != "none":
        if not spec.fp8:
            return _fp8_needs_engine(job)
        if method.quantized:
            return f"fp8 {job.fp8}: the base of qlora is dequantized to 16 bits for its products"
        if model.experts:
            return f"fp8 {job.fp8}: experts are one tensor in transformers 5, which torchao leaves in bf16"
    if (reason := _optimizer_of_loop(engine, job, processes)) is not None:
        return reason
    if job.liger and (reason := liger.unsupported(job)):
        return reason
    if job.variable_length and (reason := _no_variable_length(job)):
        return reason
    if job.compile and job.zero_stage == 3:
        return "compile: it needs zero.stage 0, 1, 2 or auto; hooks of ZeRO-3 run inside of the blocks"
    if job.new_tokens and (reason := trained_parts.new_tokens(model, job.method)):
        return reason
    if method.llama_adapter:
        if job.compile or job.fp8 != "none":
            setting = "compile" if job.compile else f"fp8 {job.fp8}"
            return f"{setting}: not supported with LLaMA-Adapters, which change blocks and linear layers"
        return trained_parts.llama_adapter(model, job.method)
    if job.trained_modules and method.adapters:
        reason = trained_parts.modules_to_save(model)
    return reason or _experts(engine, job)


def _no_variable_length(job: Job) -> str | None:
    """Return the reason why a job of the loop cannot have variable-length attention on GPUs."""
    if job.vision is not None:
        return f"variable_length: {varlen.OF_IMAGES}"
    reason = varlen.unsupported(job.model, job.task, job.method, "bf16")
    return reason and f"variable_length: {reason}"


def _task_of_loop(job: Job) -> str | None:
    """Return the reason why the loop does not support the task with these settings."""
    model = job.model
    task = TASKS[job.task]
    if task.draws_answers:
        return ELSEWHERE
    if not task.preferences:
        return None
    if job.packing:
        return _answers_not_packed(job)
    if job.task != "reward":
        return None
    if METHODS[job.method].llama_adapter:
        return f"task reward with method {job.method}: no head is trained with LLaMA-Adapters"
    if not family_of(model.family).scores_texts:
        return f"task reward: transformers has no sequence classification for {model.family} models"
    if "lm_head" in job.trained_modules:
        return "lora.modules_to_save: a reward model has no lm_head"
    return None


def _answers_not_packed(job: Job) -> str:
    row_kind = "an answer that is judged" if TASKS[job.task].judged else "a pair of answers"
    return f"packing: a row of {job.task} is {row_kind}, which cannot share a sequence with others"


def _loop_model(engine: str, model: ModelSpec) -> str | None:
    """Return the reason why transformers' code or the published weights of a model are unsuitable for the
    loop.
    """
    if not model.causal:
        return f"{model.name} is an encoder, and {engine} trains next-token prediction only"
    if family_of(model.family).code_elsewhere:
        return f"{model.name} is a {model.family} model, for which transformers has no code"
    if model.family == "mpt" and model.position_embeddings:
        return f"{model.name} has learned positions, which transformers' mpt does not support"
    return _partial_rotation(model)


def untested_family_note(model: ModelSpec) -> str | None:
    """Return the note of a plan for a model family that this package was not tested with."""
    if model.own_code:
        return (
            f"{model.family} models run code from their folder, which needs trust_remote_code; memory and "
            "speed are those of a Llama of these widths"
        )
    if not untried.is_untried(model.family):
        return None
    return (
        f"{model.family} models are untried here: transformers trains them, and memory and speed are those "
        "of a Llama of these widths"
    )


def _experts(engine: str, job: Job) -> str | None:
    """Return the reason why adapters on experts, or on experts only, are not supported; None if they are.

    With ZeRO-3, PEFT 0.18 cannot read the shape of the partitioned tensor, and the plan may choose ZeRO-3.
    """
    model = job.model
    if not METHODS[job.method].adapters or not job.lora_experts:
        return _only_expert_adapters(job)
    if (reason := _no_experts(model)) is not None:
        return reason
    if job.method != "lora":
        return f"lora.experts with method {job.method}: PEFT supports only LoRA adapters on experts"
    if ENGINES[engine].sharding_options == "zero":
        return "lora.experts: PEFT cannot add them to weights sharded by ZeRO-3; engine fsdp2 can"
    if job.compile:
        return "compile: PEFT inserts adapters on experts at each forward pass"
    if job.task == "reward" or job.new_tokens:
        setting = "task reward" if job.task == "reward" else "new_tokens"
        return f"lora.experts with {setting}: its adapter is not merged, and its base would lack the new rows"
    return _only_expert_adapters(job)


def _no_experts(model: ModelSpec) -> str | None:
    return None if model.experts else f"lora.experts: {model.name} has no experts"


def _only_expert_adapters(job: Job) -> str | None:
    """Return the reason why adapters on experts only are not supported: PEFT's LoRA has no such layer."""
    model = job.model
    if not METHODS[job.method].adapters or not model.experts or set(job.lora_targets) & set(model.all_linear):
        return None
    return (
        "lora.targets names experts only, which are not linear layers in transformers 5; "
        f"{model.name} can have them on {', '.join(model.all_linear)}"
    )


def _optimizer_of_loop(engine: str, job: Job, processes: int) -> str | None:
    """Return the reason why the loop cannot use the optimizer with the engine's sharding."""
    name = job.optimizer
    if job.optimizer_in_backward:
        return f"optimizer.in_backward needs engine torchtune, as {engine} steps after the backward pass"
    if ENGINES[engine].sharding_options == "zero":
        if OPTIMIZERS[name].needs_matrices:
            return f"optimizer {name} needs complete matrices, and ZeRO shards them into flat pieces"
        return None
    if OPTIMIZERS[name].paged:
        return f"optimizer {name} of bitsandbytes does not support weights sharded by FSDP2"
    if name == "adafactor" and processes > 1:
        return f"optimizer {name}: torch 2.13's in-place norms do not support weights sharded by FSDP2"
    if name == "adafactor" and job.precision not in ("bf16", "fp32"):
        return (
            f"optimizer {name} does not support FSDP2's fp32 copies of the weights; precision bf16 has none"
        )
    return None
