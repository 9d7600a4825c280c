"""Conversion of one row of measurements to a Setup."""

from __future__ import annotations

import re
from typing import Any

from benchmarks.published import row_models, vocabulary
from benchmarks.published.cells import Cells
from benchmarks.published.vocabulary import UnsupportedRow
from estimator.hardware import Gpu
from estimator.models import PROJECTIONS
from estimator.setup import Setup
from estimator.vocabulary import Checkpointing, Engine, Precision, Schedule, Sharding

# Each engine's default where a table leaves the cell blank: torchtitan's train configs select
# ("selective"), torchtune's recipes recompute everything, Transformers and Megatron-Core nothing.
_CHECKPOINTING: dict[str, Checkpointing] = {"torchtitan": "selective", "torchtune": "full"}
# PEFT's default rank and targets for Llama's kind of models, which are torchtune's and litgpt's targets too
# (peft/tuners/lora/config.py, peft/utils/constants.py); Megatron-Bridge adapts every linear layer at rank 32
# (megatron/bridge/peft/lora.py).
_RANK, _TARGETS = {"megatron": 32}, {"megatron": PROJECTIONS}
# Sequences of an optimizer step in litgpt's config_hub/finetune/*/full.yaml
_LITGPT_BATCH = 64


def setup_of(cells: Cells, gpu: Gpu | None) -> Setup:
    """Convert a row to a training step; unstated values are the engine's defaults.

    Raises :class:`UnsupportedRow` if the row is incomplete or describes something that isn't modeled, and
    :class:`UserError` if it contradicts itself.
    """
    engine = vocabulary.engine_of(cells.text("framework"))
    method, task, quantized, embeddings = vocabulary.method_of(cells.text("method"))
    seq_len, micro_batch = cells.whole("seq_len"), cells.whole("micro_batch")
    if not seq_len or not micro_batch:
        raise UnsupportedRow("the batch or the sequence length is not stated")
    model = row_models.model_of(_dims(cells, seq_len))
    targets = vocabulary.targets_of(cells.text("lora_targets")) or _TARGETS.get(engine, ("q_proj", "v_proj"))
    if set(PROJECTIONS) <= set(targets):  # all linear layers that the model has
        targets = tuple(name for name in targets if name in model.linear_shapes or name not in PROJECTIONS)
    if embeddings:
        targets = tuple(name for name in targets if name not in ("embed_tokens", "lm_head"))
    loss, chunks = vocabulary.loss_of(cells.text("loss_impl"), engine, seq_len)
    checkpointing = vocabulary.checkpointing_of(cells.text("act_ckpt"))
    if checkpointing == "selective" and engine not in ("torchtitan", "torchtune", "megatron"):
        raise UnsupportedRow(f"which blocks {cells.text('framework')} recomputes is not stated")
    parallelism = _parallelism(cells, engine, micro_batch, gpu)
    return Setup(
        model=model,
        engine=engine,
        engine_version=vocabulary.version_of(
            cells.text("framework"),
            cells.text("loss_impl"),
            cells.text("notes"),
            engine,
        ),
        dispatch_by_expert=vocabulary.dispatches_by_expert(cells.text("notes"), engine),
        method=method,
        task=task,
        reference_copy="trl" in cells.text("framework").lower(),
        lora_rank=cells.whole("lora_rank") or (8 if method == "full" else _RANK.get(engine, 8)),
        lora_targets=PROJECTIONS if method == "full" else targets,
        trained_modules=("embed_tokens", "lm_head") if embeddings else (),
        quantization=vocabulary.quantization_of(cells.text("quant"), quantized),
        upcast_frozen=vocabulary.upcasts_frozen(
            cells.text("framework"), cells.text("quant"), cells.text("notes"), engine, quantized=quantized
        ),
        looped_experts=bool(re.search("transformers 4", cells.text("framework").lower())),
        undivided_base=quantized and engine == "deepspeed" and "storage" not in cells.text("quant").lower(),
        precision=_precision(cells, engine),
        fp8=vocabulary.fp8_of(cells.text("compute_dtype"), engine),
        optimizer=vocabulary.optimizer_of(cells.text("optimizer")),
        fused_optimizer=vocabulary.fused_optimizer_of(cells.text("optimizer")),
        optimizer_in_backward=bool(cells.flag("opt_in_bwd")),
        seq_len=_padded(seq_len, parallelism["context"]),
        fixed_length=vocabulary.fixed_length(cells.text("packing")),
        longest_first=bool(re.search("longest-first|longest rows first", cells.text("packing").lower())),
        longest_once="longest-first" in cells.text("packing").lower(),
        # an emptied cache keeps no block that is too small for what follows, as expandable segments don't
        expandable_segments=bool(re.search("expandable|empty_cache", cells.text("notes").lower())),
        document_mask="dense document mask" in cells.text("packing").lower(),
        variable_length="cumulative lengths" in cells.text("packing").lower(),
        document_tokens=vocabulary.document_tokens_of(cells.text("packing")),
        checkpointing=checkpointing or _CHECKPOINTING.get(engine, "none"),
        # Unsloth's own checkpointing moves each block's input to the host
        activation_offload=bool(cells.flag("act_offload")) or "unsloth" in cells.text("act_ckpt").lower(),
        compile=bool(cells.flag("compile")),
        loss=loss,
        loss_chunks=chunks,
        attention=vocabulary.attention_of(cells.text("attn")),
        flash_version=vocabulary.flash_version_of(cells.text("attn"), engine),
        device="cpu" if cells.text("gpu").upper() == "CPU" else "cuda",
        **_offload(cells),
        **parallelism,
    )


def _padded(seq_len: int, degree: int) -> int:
    """Pad the sequence length to a multiple of the context parallel degree."""
    return -(-seq_len // degree) * degree


def _dims(cells: Cells, seq_len: int) -> row_models.Dims:
    return row_models.Dims(
        name=cells.text("model"),
        parameters=cells.whole("n_params"),
        hidden=cells.whole("hidden"),
        layers=cells.whole("layers"),
        heads=cells.whole("heads"),
        kv_heads=cells.whole("kv_heads"),
        ffn=cells.whole("ffn"),
        vocab=cells.whole("vocab"),
        tied=cells.flag("tied"),
        seq_len=seq_len,
    )


def _precision(cells: Cells, engine: Engine) -> Precision:
    """Derive the precision from the dtypes of parameters and computation.

    DeepSpeed and Megatron-Core always keep fp32 master weights. If the table doesn't state the dtype of
    parameters, it is fp32 for torchtitan, Composer and fms-fsdp, and the dtype of computation for others.
    """
    stored_dtype, compute_dtype = cells.text("param_dtype").lower(), cells.text("compute_dtype").lower()
    method = cells.text("method").lower()
    if compute_dtype in ("fp32", "float32", "tf32"):
        return "fp32"
    if engine in ("deepspeed", "megatron"):
        return "bf16-mixed"
    if "pure" in method or re.search("16|half", stored_dtype):  # bytes are the same in fp16
        return "bf16"
    if "fp16" in compute_dtype or "float16" in compute_dtype.replace("bfloat16", ""):
        return "fp16-autocast"
    sharded = bool(cells.text("fsdp_shard") or cells.text("zero_stage"))
    if engine == "transformers" and sharded and not stored_dtype and method.startswith("full"):
        return (
            "bf16-mixed"  # accelerate's FSDP keeps trained parameters in fp32 (accelerator.py, prepare_model)
        )
    if "autocast" in compute_dtype and "autocast_adapter" not in compute_dtype:
        return "bf16-autocast"
    if "fp32" in stored_dtype or "float32" in stored_dtype or "(amp" in method or "amp" in compute_dtype:
        return "bf16-mixed" if sharded or engine in ("torchtitan", "composer", "fsdp2") else "bf16-autocast"
    return "bf16-mixed" if engine in ("torchtitan", "composer") else "bf16"


def _offload(cells: Cells) -> dict[str, Any]:
    text = cells.text("cpu_offload").lower()
    if text in ("", "0", "none", "false", "no"):
        return {}
    target = "nvme" if "nvme" in text else "cpu"
    weights = re.search(r"param|fsdp|all|weights|^1$|true", text)
    return {"offload": "all" if weights else "optimizer", "offload_to": target}


def _parallelism(cells: Cells, engine: Engine, micro_batch: int, gpu: Gpu | None) -> dict[str, Any]:
    """Derive the parallel degrees; their product is the number of GPUs."""
    tensor, pipeline = cells.whole("tp") or 1, cells.whole("pp") or 1
    flag = cells.whole("sp")
    if pipeline == 1 and re.search("device_map|naive (model|pipeline|mp)", cells.text("notes").lower()):
        pipeline = cells.whole("n_gpus") or 1  # layers one after the other on all GPUs
    schedule = _schedule(cells, pipeline, cells.whole("vpp") or 1)
    # torchtitan gives each process 2 stages where its schedule takes several (distributed/pipeline)
    virtual = cells.whole("vpp") or (2 if schedule in ("interleaved", "zero-bubble") else 1)
    context = max(cells.whole("cp") or 1, flag if flag and flag > 1 else 1)  # a count of sp is Ulysses'
    world, sharding, shard, replicate = _data_parallel(cells, engine, tensor * pipeline, context)
    passes = _accumulation(cells, engine, micro_batch, world // (tensor * pipeline * context) or 1)
    if engine == "torchtitan" and pipeline > 1 and passes == 1:
        # its tables state the batch of a process, which the pipeline cuts in as many pieces as it has stages
        passes = pipeline if micro_batch % pipeline == 0 else micro_batch
        micro_batch //= passes
    return {
        "micro_batch_size": micro_batch,
        "sharding": sharding,
        "shard": shard,
        "replicate": replicate,
        "flat_parameters": "FSDP1" in cells.text("framework") and engine != "deepspeed",
        "tensor": tensor,
        "sequence_parallel": flag is None or flag > 0,
        "context": context,
        "pipeline": pipeline,
        "virtual_stages": virtual if pipeline > 1 else 1,
        "schedule": schedule,
        "expert": cells.whole("ep") or 1,
        "accumulation": passes,
        "processes_per_node": _per_node(cells, world, gpu),
    }


def _data_parallel(
    cells: Cells, engine: Engine, model_parallel: int, context: int
) -> tuple[int, Sharding, int, int]:
    """Return the number of GPUs, the sharding of states, and the degrees of sharding and replication."""
    gpus, stage = cells.whole("n_gpus"), cells.whole("zero_stage")
    shard, replicate = cells.whole("fsdp_shard"), cells.whole("dp_replicate") or 1
    if gpus is None and shard is None:
        raise UnsupportedRow("the number of GPUs is not stated")
    world = gpus or (shard or 1) * replicate * model_parallel * context
    rest, remainder = divmod(world, model_parallel)
    if remainder or rest < 1:
        raise UnsupportedRow(f"{world} GPUs cannot be divided by tensor x pipeline parallel {model_parallel}")
    if engine == "deepspeed":
        return world, _zero(stage), rest if stage else 1, 1 if stage else rest
    if engine == "megatron":
        if re.search(r"\bFSDP ?= ?[1-9]", cells.text("notes")):  # Megatron-FSDP
            return world, "fsdp", rest, 1
        distributed = "dist" in cells.text("optimizer").lower()
        return (
            world,
            "zero1" if distributed else "ddp",
            rest if distributed else 1,
            1 if distributed else rest,
        )
    gathered = stage in (1, 2) or re.search(r"reshard\w* ?= ?(False|never)", cells.text("notes"))
    fsdp: Sharding = "shard_grad_op" if gathered else "fsdp"
    if shard is None:
        sharded = stage is not None and stage > 0 and rest > 1
        if sharded:
            return world, fsdp, rest // replicate, replicate
        return world, "ddp" if rest > 1 else "none", 1, rest
    for degree in (shard * context, shard):  # torchtitan shares weights over context parallel as well
        if degree * replicate == rest:
            if degree == 1 and engine == "fsdp2":  # wrapped, though one process holds all states
                return world, "fsdp", 1, rest
            if degree == 1:
                return world, "ddp" if rest > 1 else "none", 1, rest
            return world, fsdp, degree, replicate
    raise UnsupportedRow(f"fsdp_shard {shard} and the other degrees do not multiply to {world} GPUs")


def _zero(stage: int | None) -> Sharding:
    stages: tuple[Sharding, ...] = ("zero0", "zero1", "zero2", "zero3")
    if stage is None or not 0 <= stage <= 3:
        raise UnsupportedRow("DeepSpeed's ZeRO stage is not stated")
    return stages[stage]


def _accumulation(cells: Cells, engine: Engine, micro_batch: int, data_parallel: int) -> int:
    """Return passes per step: stated, or from a global batch ("128/mb" per process, "GBS=512" total)."""
    text = cells.text("grad_accum")
    if share := re.fullmatch(r"(\d+) ?/ ?mb", text):
        return max(int(share[1]) // micro_batch, 1)
    stated = cells.whole("grad_accum")
    if stated:
        return stated
    if match := re.search(r"\bGBS ?=? ?(\d+)", cells.text("notes")):
        return max(int(match[1]) // (micro_batch * data_parallel), 1)
    if engine == "litgpt" and vocabulary.method_of(cells.text("method"))[0] == "full":
        return max(_LITGPT_BATCH // (micro_batch * data_parallel), 1)
    return 1


def _schedule(cells: Cells, pipeline: int, virtual: int) -> Schedule:
    if pipeline == 1:
        return "none"
    text = " ".join(cells.text(column) for column in ("notes", "framework", "locator")).lower()
    if re.search(r"zero[- ]?bubble|zbv", text):
        return "zero-bubble"
    if re.search("device_map|naive", text):
        return "split"
    if re.search("gpipe|afab", text):
        return "afab"
    return "interleaved" if virtual > 1 or "interleaved" in text else "1f1b"


def _per_node(cells: Cells, world: int, gpu: Gpu | None) -> int:
    """Return GPUs per NVLink domain: those of a node, or the 72 of an NVL72 rack."""
    if gpu is not None and "NVL72" in gpu.interconnect:
        return min(world, 72)
    nodes = cells.whole("nodes")
    return -(-world // nodes) if nodes else min(world, 8)
