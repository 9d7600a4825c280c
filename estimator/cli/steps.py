"""From options to the Setup that they mean."""

from __future__ import annotations

from typing import Any

from estimator.cli.defaults import EngineDefaults, defaults
from estimator.cli.options import DEFAULT_SEQ_LEN, METHODS, SetupOptions
from estimator.errors import UserError
from estimator.memory import implementations
from estimator.models.spec import ModelSpec
from estimator.planning.engines import dense_mask
from estimator.setup import Setup


def setup_from(wanted: SetupOptions, model: ModelSpec, gpus: int) -> Setup:
    """The step that the options ask for, on ``gpus`` GPUs of each machine.

    Raises UserError for a value that is not known and for values that contradict each other.
    """
    engine = defaults(wanted.engine)
    method, quantization = _method(wanted, engine)
    shard, replicate, sharding = _data_parallel(wanted, engine, gpus)
    sharded = shard > 1
    precision = "fp32" if wanted.device == "cpu" else engine.precision_of(sharded=sharded)
    seq_len = _or(wanted.seq_len, min(DEFAULT_SEQ_LEN, model.max_seq_len))
    packed = engine.fixed_length if wanted.packed is None else wanted.packed
    setup = Setup(
        model=model,
        engine=wanted.engine,  # type: ignore[arg-type]
        engine_version=_version(wanted),
        method=method,  # type: ignore[arg-type]
        task=wanted.task,  # type: ignore[arg-type]
        lora_rank=_or(wanted.lora_rank, engine.lora_rank),
        lora_targets=_targets(wanted, engine, model),
        trained_modules=_names(wanted.trained_modules or ""),
        quantization=quantization,  # type: ignore[arg-type]
        upcast_frozen=wanted.upcast_frozen,
        precision=wanted.precision or precision,  # type: ignore[arg-type]
        fp8=wanted.fp8,  # type: ignore[arg-type]
        optimizer=wanted.optimizer,  # type: ignore[arg-type]
        optimizer_in_backward=wanted.optimizer_in_backward,
        sharding=sharding,  # type: ignore[arg-type]
        flat_parameters=wanted.flat_parameters,
        shard=shard,
        replicate=replicate,
        tensor=wanted.tp,
        sequence_parallel=_or(wanted.sequence_parallel, engine.sequence_parallel),
        context=wanted.cp,
        pipeline=wanted.pp,
        virtual_stages=wanted.virtual_stages,
        schedule=_schedule(wanted),  # type: ignore[arg-type]
        expert=wanted.ep,
        micro_batch_size=wanted.micro_batch_size,
        # A pipeline with fewer micro batches than stages is never full
        accumulation=_or(wanted.accumulation, max(wanted.pp, 1)),
        seq_len=seq_len,
        fixed_length=packed,
        longest_once=wanted.longest_once,
        document_mask=_or(
            wanted.document_mask, packed and engine.document_mask and dense_mask(wanted.engine, wanted.device)
        ),
        checkpointing=wanted.checkpointing or engine.checkpointing_of(sharded=sharded),  # type: ignore[arg-type]
        activation_offload=wanted.activation_offload,
        compile=wanted.compile,
        loss=wanted.loss or engine.loss,  # type: ignore[arg-type]
        loss_chunks=_or(wanted.loss_chunks, engine.chunks_of(seq_len)),
        attention=wanted.attention,  # type: ignore[arg-type]
        offload=wanted.offload,  # type: ignore[arg-type]
        offload_to=wanted.offload_to,  # type: ignore[arg-type]
        device=wanted.device,  # type: ignore[arg-type]
        processes_per_node=gpus,
        keep_checkpoints=wanted.keep_checkpoints,
    )
    if setup.adapters:
        _ = setup.adapter_parameters  # refuses targets that the model lacks
    return setup


def _or(value: Any, otherwise: Any) -> Any:
    return otherwise if value is None else value


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _version(wanted: SetupOptions) -> str:
    known = [version for engine, version in implementations.table() if engine == wanted.engine and version]
    if wanted.engine_version and wanted.engine_version not in known:
        raise UserError(
            f"--engine-version {wanted.engine_version} of {wanted.engine} is not known.",
            f"Choose one of {', '.join(known)}, or leave it out." if known else "Leave it out.",
        )
    return wanted.engine_version


def _method(wanted: SetupOptions, engine: EngineDefaults) -> tuple[str, str]:
    """Method and quantization: qlora and qdora are adapters on a quantised base."""
    if wanted.method not in METHODS:
        raise UserError(f"--method {wanted.method} is not known.", f"Choose one of {', '.join(METHODS)}.")
    if not wanted.method.startswith("q"):
        return wanted.method, wanted.quantization or "none"
    if wanted.quantization == "none":
        raise UserError(
            f"--method {wanted.method} has a quantised base, and --quantization none asks for none.",
            f"Use --method {wanted.method[1:]}, or leave --quantization out.",
        )
    return wanted.method[1:], wanted.quantization or engine.quantization


def _targets(wanted: SetupOptions, engine: EngineDefaults, model: ModelSpec) -> tuple[str, ...]:
    if wanted.lora_targets is not None and wanted.lora_targets != "all":
        names = _names(wanted.lora_targets)
        if not names:
            raise UserError("--lora-targets is empty: no layer would be trained.", "Name some, or say all.")
        return names
    if wanted.lora_targets is None and engine.lora_targets is not None:
        known = tuple(name for name in engine.lora_targets if name in model.linear_shapes)
        if known:
            return known
    return tuple(model.projections)


def _schedule(wanted: SetupOptions) -> str:
    if wanted.schedule is not None:
        return wanted.schedule
    if wanted.pp == 1:
        return "none"
    return "interleaved" if wanted.virtual_stages > 1 else "1f1b"


def _data_parallel(wanted: SetupOptions, engine: EngineDefaults, gpus: int) -> tuple[int, int, str]:
    """(GPUs that share one copy, such groups, sharding) of the GPUs that tensor and pipeline leave."""
    counts = {
        "--nodes": wanted.nodes,
        "--gpus": gpus,
        "--tp": wanted.tp,
        "--pp": wanted.pp,
        "--cp": wanted.cp,
        "--ep": wanted.ep,
        "--shard": wanted.shard,
        "--dp-replicate": wanted.dp_replicate,
    }
    for name, value in counts.items():
        if value is not None and value < 1:
            raise UserError(f"{name} {value} must be a whole number above 0.")
    world = wanted.nodes * gpus
    for degree, name in ((wanted.tp * wanted.pp * wanted.cp, "--tp x --pp x --cp"), (wanted.ep, "--ep")):
        if world % degree:
            raise UserError(
                f"{wanted.nodes} node(s) of {gpus} GPU(s) can't be divided by {name} = {degree}.",
                f"Ask for a multiple of {degree} GPUs with --gpus and --nodes, or for less parallelism.",
            )
    data = world // (wanted.tp * wanted.pp)
    sharding = wanted.sharding or (engine.sharding if data > 1 else "none")
    if sharding in ("none", "ddp", "zero0"):
        shard, replicate = wanted.shard or 1, wanted.dp_replicate or data // (wanted.shard or 1)
    else:
        shard = wanted.shard or data // (wanted.dp_replicate or 1)
        replicate = wanted.dp_replicate or data // max(shard, 1)
    if shard * replicate != data:
        raise UserError(
            f"--shard {shard} x --dp-replicate {replicate} is not the {data} GPUs that are left beside "
            f"--tp {wanted.tp} and --pp {wanted.pp}.",
            "Leave one of the two out.",
        )
    return shard, replicate, sharding
