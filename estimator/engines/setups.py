"""Training step (Setup) of an engine for a Job in a Layout."""

from __future__ import annotations

from estimator.engines import automatic, liger, varlen
from estimator.job import Job
from estimator.models import ModelSpec
from estimator.plan import Layout
from estimator.setup import Setup
from estimator.vocabulary import ENGINES, METHODS, SHARDINGS, TASKS, Precision


def no_variable_length(
    engine: str, device: str, model: ModelSpec, task: str, method: str, precision: str
) -> str | None:
    """Return the reason why an engine cannot train with variable-length attention, or None if it can."""
    if not ENGINES[engine].runs_loop:
        return f"engine {engine} has its own attention"
    if device != "cuda":
        return varlen.NEEDS_GPU
    return varlen.unsupported(model, task, method, precision)


def variable_length(
    engine: str,
    device: str,
    model: ModelSpec,
    task: str,
    method: str,
    precision: str,
    *,
    requested: bool | None = None,
) -> bool:
    """Return whether a loop engine trains with variable-length attention and batches without padding.

    ``requested``: the setting ``variable_length``; None: where supported.
    """
    reason = no_variable_length(engine, device, model, task, method, precision)
    return requested is not False and reason is None


def dense_mask(
    engine: str,
    device: str,
    model: ModelSpec,
    task: str,
    method: str,
    precision: str,
    *,
    requested: bool | None = None,
) -> bool:
    """Return whether packed samples are separated by a dense mask. ``requested``: as above.

    On GPUs, torchtune uses flex attention's sparse mask (torchtune 0.6.1, utils/_import_guard.py), and the
    loop engines use variable-length attention for most models.
    """
    if ENGINES[engine].streams:
        return False
    if engine == "torchtune" and device == "cuda":
        return False
    return not variable_length(engine, device, model, task, method, precision, requested=requested)


def _precision(job: Job, layout: Layout) -> Precision:
    """Convert the precision of a layout for TRL: fp32 weights with autocast, 16 bits for a frozen base."""
    if job.engine != "trl" or layout.precision != "bf16-mixed":
        return layout.precision
    return "bf16" if job.adapters else "bf16-autocast"


def setup_of(job: Job, layout: Layout) -> Setup:
    """Return the training step of a job's engine in a layout."""
    job = automatic.with_choices(job, layout.device, layout.precision, layout.sharding)
    engine, task, method = ENGINES[job.engine], TASKS[job.task], METHODS[job.method]
    shared = SHARDINGS[layout.sharding].divides
    fixed_length = bool(job.packing) or engine.streams or task.images
    # With context parallelism, states are sharded over its processes as well
    processes = layout.world_size // (layout.tensor_parallel * layout.pipeline_parallel)
    step = (job.engine, layout.device, job.model, job.task, job.method, layout.precision)
    return Setup(
        model=job.model,
        engine=engine.code,
        method=method.base,
        task=job.task,
        quantization=job.quantization if method.quantized else "none",
        lora_rank=job.lora_rank,
        lora_targets=job.lora_targets,
        lora_experts=job.lora_experts and job.low_rank,
        trained_modules=job.trained_modules if job.low_rank else (),
        llama_adapter=job.llama_adapter,
        precision=_precision(job, layout),
        optimizer=job.optimizer,
        sharding=layout.sharding,
        shard=processes // layout.replicate if shared else 1,
        replicate=layout.replicate if shared else processes,
        tensor=layout.tensor_parallel,
        context=layout.context_parallel,
        pipeline=layout.pipeline_parallel,
        virtual_stages=layout.virtual_stages,
        schedule=layout.schedule,
        expert=layout.expert_parallel,
        micro_batch_size=layout.micro_batch_size,
        accumulation=layout.accumulation,
        seq_len=layout.seq_len,
        fixed_length=fixed_length,
        longest_first=job.longest_first and not fixed_length,
        expandable_segments=job.expandable_segments,
        variable_length=job.vision is None and variable_length(*step, requested=job.variable_length),
        document_mask=bool(job.packing) and dense_mask(*step, requested=job.variable_length),
        checkpointing=layout.recompute if layout.activation_checkpointing else "none",
        recompute_every=layout.recompute_every,
        fp8=job.fp8,
        compile=bool(job.compile),
        engine_version=liger.version(job),
        loss="fused" if job.liger else engine.loss,
        optimizer_in_backward=layout.optimizer_in_backward,
        offload=engine.offload if layout.offload == "cpu" else "none",
        device=layout.device,
        processes_per_node=layout.processes_per_node,
        keep_checkpoints=job.keep_checkpoints,
        adapter_only=job.adapter_only and job.adapters,
        answers=job.answers,
        vision=job.vision,
        images_per_row=job.images_per_row,
        image_size=job.image_size,
    )
