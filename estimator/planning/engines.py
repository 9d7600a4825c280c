"""What each engine implies where a Job and a Layout leave it open. To add an engine, add a row here."""

from __future__ import annotations

from typing import Literal

from estimator.job import Job
from estimator.plan import Layout
from estimator.planning import liger
from estimator.setup import IMAGE_TASK, LossKind, Precision, Setup, StateSharding, drawn_answer

# launchers/engines/torchtune/config.py uses the chunked loss; launchers/dataset/batches.py recomputes it.
# TRL 1.16 has one tile of the logits at a time (kernels/chunked_logprob.py).
# torchtitan computes the whole cross-entropy by default (components/loss.py); Megatron-LM does so over the
# vocabulary's shards (core/tensor_parallel/cross_entropy.py).
LOSSES: dict[str, LossKind] = {
    "torchtune": "chunked",
    "deepspeed": "recomputed",
    "fsdp2": "recomputed",
    "trl": "fused",
    "torchtitan": "plain",
    "megatron": "plain",
}


# They cut one stream of tokens into pieces of seq_len: every batch is full (torchtitan,
# hf_datasets/text_datasets.py; Megatron-LM, core/datasets/gpt_dataset.py)
STREAMS = ("torchtitan", "megatron")


def dense_mask(engine: str, device: str) -> bool:
    """Whether packed samples are kept apart by a dense mask.

    torchtune has flex attention's sparse one on GPUs since Turing (torchtune 0.6.1, utils/_import_guard.py).
    """
    return engine not in STREAMS and not (engine == "torchtune" and device == "cuda")


def _offloaded(job: Job, layout: Layout) -> Literal["none", "optimizer", "all"]:
    """What leaves the GPU: DeepSpeed's optimizer states, or all that FSDP2 divides."""
    if layout.offload != "cpu":
        return "none"
    return "all" if job.engine == "fsdp2" else "optimizer"


def _answer_len(job: Job) -> int:
    """Tokens of the answers that a step draws; 0: none."""
    if job.task != "grpo":
        return 0
    return drawn_answer(job.seq_len) if job.answer_len is None else job.answer_len


def _precision(job: Job, layout: Layout) -> Precision:
    """What the layout's precision is under TRL: fp32 weights and autocast, and 16 bits of a frozen base."""
    if job.engine != "trl" or layout.precision != "bf16-mixed":
        return layout.precision
    return "bf16" if job.adapters else "bf16-autocast"


def setup_of(job: Job, layout: Layout) -> Setup:
    """The training step that a job's engine runs in a layout."""
    sharding: StateSharding = layout.sharding
    shared = layout.sharding not in ("none", "ddp", "zero0")
    fixed_length = job.packing or job.engine in STREAMS or job.task == IMAGE_TASK
    # With context parallel the states are shared over its processes as well
    processes = layout.world_size // (layout.tensor_parallel * layout.pipeline_parallel)
    return Setup(
        model=job.model,
        engine="transformers" if job.engine == "trl" else job.engine,  # type: ignore[arg-type]  # not "auto"
        method="lora" if job.method == "qlora" else job.method,  # type: ignore[arg-type]
        task=job.task,
        quantization=job.quantization if job.method == "qlora" else "none",
        lora_rank=job.lora_rank,
        lora_targets=job.lora_targets,
        lora_experts=job.lora_experts and job.low_rank,
        trained_modules=job.trained_modules if job.low_rank else (),
        adapter_prompt_length=job.adapter_prompt_length,
        adapter_start_layer=job.adapter_start_layer,
        precision=_precision(job, layout),
        optimizer=job.optimizer,
        sharding=sharding,
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
        document_mask=job.packing and dense_mask(job.engine, layout.device),
        checkpointing=job.recompute if layout.activation_checkpointing else "none",
        recompute_every=job.recompute_every,
        fp8=job.fp8,
        average=job.average,
        compile=job.compile,
        engine_version=liger.VERSION if job.liger else "",
        loss="fused" if job.liger else LOSSES[job.engine],
        optimizer_in_backward=layout.optimizer_in_backward,
        offload=_offloaded(job, layout),
        device=layout.device,
        processes_per_node=layout.processes_per_node,
        keep_checkpoints=job.keep_checkpoints,
        adapter_only=job.adapter_only and job.adapters,
        answer_len=_answer_len(job),
        compares=job.task == "grpo" and (job.adapters if job.compares is None else job.compares),
        reward_parameters=job.reward_parameters,
    )
