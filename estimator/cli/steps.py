"""Conversion of options to a Setup."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

from estimator.cli.options import SetupOptions, names_of
from estimator.engines import automatic, images, liger
from estimator.engines.setups import dense_mask, variable_length
from estimator.engines.vision import check_model
from estimator.errors import UserError
from estimator.formatting import format_count
from estimator.hardware import Gpu
from estimator.job import Job
from estimator.memory import implementations
from estimator.models.diffusion import DiffusionSpec
from estimator.models.spec import ModelSpec
from estimator.names import unknown_choice
from estimator.option_checks import check_count
from estimator.planning.search import precision_of
from estimator.setup import Answers, LlamaAdapter, Setup
from estimator.vocabulary import (
    ENGINES,
    LAUNCHED_ENGINES,
    METHODS,
    SHARDINGS,
    TASKS,
    Engine,
    EngineDefaults,
    EngineSpec,
)


def setup_from(options: SetupOptions, model: ModelSpec, gpus: int, gpu: Gpu | None = None) -> Setup:
    """Build the training step that the options describe, on ``gpus`` GPUs per node.

    ``gpu``: the GPU, which decides the default precision of engines that this package launches; None: any.
    Raises UserError for unknown and for contradictory values.
    """
    options = replace(options, engine=_engine(options, model))
    model = images.trained_model(
        model, options.resolution, average=options.average, encoders=options.encoders
    )
    if options.vision is not None:
        _check_tower(options.vision, model)
    spec, engine = engine_of(options.engine)
    method, quantization = _method(options, engine)
    launched_here = options.engine in LAUNCHED_ENGINES
    shard, replicate, sharding = _data_parallel(options, engine, gpus)
    sharded = shard > 1
    seq_len = images.length_of(model, options.seq_len)
    if options.precision:
        precision = options.precision
    elif options.device == "cpu":
        precision = "fp32"
    elif launched_here and gpu is not None and not gpu.bf16:
        job = _job(options, model, seq_len, "auto")
        precision = "fp32" if job is None else precision_of(job, "cuda", gpu)
    else:
        precision = spec.precision_of(sharded=sharded)
    job = _job(options, model, seq_len, precision) if launched_here else None
    # Packing, Liger and compile are decided as in plans
    decided = None
    if job is not None:
        decided = automatic.with_choices(job, options.device, precision, sharding)  # type: ignore[arg-type]
    packed = engine.fixed_length if options.packing is None else options.packing
    if decided is not None:
        packed = bool(decided.packing) or TASKS[decided.task].images
    step = (options.engine, options.device, model, options.task, method, precision)
    with_liger = decided is not None and bool(decided.liger)
    version = "" if decided is None else liger.version(decided)
    setup = Setup(
        model=model,
        engine=options.engine,  # type: ignore[arg-type]
        engine_version=version or _version(options),
        method=method,  # type: ignore[arg-type]
        task=images.task_for(model, options.task),  # type: ignore[arg-type]
        lora_rank=_first_set(options.lora_rank, engine.lora_rank),
        lora_targets=_targets(options, engine, model),
        lora_experts=options.lora_experts,
        adapter_only=options.adapter_only,
        llama_adapter=LlamaAdapter(
            prompt_length=options.adapter_prompt_length, start_layer=options.adapter_start_layer
        ),
        trained_modules=names_of(options.trained_modules),
        quantization=quantization,  # type: ignore[arg-type]
        upcast_frozen=options.upcast_frozen,
        undivided_base=options.undivided_base,
        looped_experts=options.looped_experts,
        dispatch_by_expert=options.dispatch_by_expert,
        precision=precision,  # type: ignore[arg-type]
        fp8=options.fp8,  # type: ignore[arg-type]
        optimizer=options.optimizer,  # type: ignore[arg-type]
        fused_optimizer=options.fused_optimizer,
        optimizer_in_backward=options.optimizer_in_backward,
        sharding=sharding,  # type: ignore[arg-type]
        flat_parameters=options.flat_parameters,
        shard=shard,
        replicate=replicate,
        tensor=options.tp,
        sequence_parallel=_first_set(options.sequence_parallel, engine.sequence_parallel),
        context=options.cp,
        pipeline=options.pp,
        virtual_stages=options.virtual_stages,
        schedule=_schedule(options),  # type: ignore[arg-type]
        expert=options.ep,
        micro_batch_size=options.micro_batch_size,
        # A pipeline with fewer micro batches than stages is never full
        accumulation=_first_set(options.accumulation, max(options.pp, 1)),
        answers=Answers(reward_parameters=options.reward_parameters),
        reference_copy=options.reference_copy,
        seq_len=seq_len,
        fixed_length=packed,
        longest_first=_first_set(options.longest_first, launched_here and not packed),
        longest_once=options.longest_once,
        expandable_segments=_first_set(
            options.expandable_segments, launched_here and options.device == "cuda"
        ),
        variable_length=launched_here
        and options.vision is None
        and variable_length(*step, requested=options.variable_length),
        document_mask=_first_set(
            options.document_mask,
            packed
            and (engine.document_mask or decided is not None)
            and dense_mask(*step, requested=options.variable_length),
        ),
        document_tokens=options.document_tokens,
        checkpointing=_checkpointing(options, engine, sharded=sharded),  # type: ignore[arg-type]
        recompute_every=options.recompute_every,
        activation_offload=options.activation_offload,
        compile=bool(options.compile if decided is None else decided.compile),
        vision=options.vision,  # type: ignore[arg-type]
        images_per_row=options.images_per_row,
        image_size=options.image_size,
        loss="fused" if with_liger else options.loss or spec.loss,  # type: ignore[arg-type]
        loss_chunks=_first_set(options.loss_chunks, engine.chunks_of(seq_len)),
        flash_version=options.flash_version,
        attention=options.attention,  # type: ignore[arg-type]
        offload=options.offload,  # type: ignore[arg-type]
        offload_to=options.offload_to,  # type: ignore[arg-type]
        device=options.device,  # type: ignore[arg-type]
        processes_per_node=gpus,
        keep_checkpoints=options.keep_checkpoints,
    )
    if setup.adapters:
        _ = setup.adapter_parameters  # raises for targets that the model does not have
    return setup


def _job(options: SetupOptions, model: ModelSpec, seq_len: int, precision: str) -> Job | None:
    """Return the job of the options; None for a step that no plan can have."""
    try:
        return Job(
            model=model,
            method=options.method,  # type: ignore[arg-type]
            engine=options.engine,  # type: ignore[arg-type]
            task=images.task_for(model, options.task),  # type: ignore[arg-type]
            seq_len=seq_len,
            precision=precision,  # type: ignore[arg-type]
            fp8=options.fp8,  # type: ignore[arg-type]
            optimizer=options.optimizer,  # type: ignore[arg-type]
            optimizer_in_backward=options.optimizer_in_backward,
            recompute=options.recompute_what,  # type: ignore[arg-type]
            recompute_every=options.recompute_every,
            quantization=options.quantization or "nf4-double",  # type: ignore[arg-type]
            lora_targets=_targets(options, engine_of(options.engine)[1], model),
            lora_experts=options.lora_experts,
            trained_modules=names_of(options.trained_modules),
            vision=options.vision,  # type: ignore[arg-type]
            tensor_parallel=options.tp,
            context_parallel=options.cp,
            pipeline_parallel=options.pp,
            expert_parallel=options.ep,
            packing=options.packing,
            variable_length=options.variable_length,
            compile=options.compile,
            liger=None if options.loss is None and not options.engine_version else False,
        )
    except UserError:
        return None  # an estimate has more precisions, optimizers and parallelisms than runs


def _check_tower(vision: str, model: ModelSpec) -> None:
    """Raise UserError for a model without a vision tower, or with one of unknown shape."""
    check_model(vision, model)
    if model.vision is None:
        raise UserError(
            f"--vision {vision}: the shape of {model.name}'s vision tower is unknown, so its memory is too.",
            "Give a folder or a Hugging Face id whose config.json has vision_config, or remove --vision.",
        )


def _engine(options: SetupOptions, model: ModelSpec) -> str:
    """Resolve ``--engine auto``."""
    if options.engine != "auto":
        return options.engine
    return images.ENGINE if isinstance(model, DiffusionSpec) else "torchtune"


def engine_of(name: str) -> tuple[EngineSpec, EngineDefaults]:
    """Look up an engine and its defaults; raises UserError that lists the engines for an unknown name."""
    spec = ENGINES.get(name)
    if spec is None or spec.defaults is None:
        raise unknown_choice(f"--engine {name}", name, get_args(Engine))
    return spec, spec.defaults


def _checkpointing(options: SetupOptions, engine: EngineDefaults, *, sharded: bool) -> str:
    if options.activation_checkpointing is None:
        default = engine.checkpointing_of(sharded=sharded)
        return default if default == "none" else options.recompute_what or default
    return options.recompute_what or "full" if options.activation_checkpointing else "none"


def _first_set(value: Any, otherwise: Any) -> Any:
    return otherwise if value is None else value


def _version(options: SetupOptions) -> str:
    versions = [
        version for engine, version in implementations.table() if engine == options.engine and version
    ]
    if options.engine_version and options.engine_version not in versions:
        raise UserError(
            f"--engine-version {options.engine_version} of {options.engine} is not known.",
            f"Choose one of {', '.join(versions)}, or remove it." if versions else "Remove it.",
        )
    return options.engine_version


def _method(options: SetupOptions, engine: EngineDefaults) -> tuple[str, str]:
    """Return method and quantization: qlora and qdora are adapters on a quantized base."""
    if options.method not in METHODS:
        raise unknown_choice(f"--method {options.method}", options.method, METHODS)
    method = METHODS[options.method]
    if not method.quantized:
        return method.base, options.quantization or "none"
    if options.quantization == "none":
        raise UserError(
            f"--method {options.method} needs a quantized base, which --quantization none disables.",
            f"Use --method {method.base}, or remove --quantization.",
        )
    return method.base, options.quantization or engine.quantization


def _targets(options: SetupOptions, engine: EngineDefaults, model: ModelSpec) -> tuple[str, ...]:
    if options.lora_targets is not None and options.lora_targets != "all-linear":
        names = names_of(options.lora_targets)
        if not names:
            raise UserError(
                "--lora-targets is empty: no layer would be trained.", "Name some layers, or use all-linear."
            )
        return names
    if options.lora_targets is None and engine.lora_targets is not None:
        targets = tuple(name for name in engine.lora_targets if name in model.linear_shapes)
        if targets:
            return targets
    return tuple(model.projections)


def _schedule(options: SetupOptions) -> str:
    if options.schedule is not None:
        return options.schedule
    if options.pp == 1:
        return "none"
    return "interleaved" if options.virtual_stages > 1 else "1f1b"


def _data_parallel(options: SetupOptions, engine: EngineDefaults, gpus: int) -> tuple[int, int, str]:
    """Return (shards, replicas, sharding) of the data-parallel GPUs."""
    check_count("gpus", gpus)
    for name in ("nodes", "tp", "pp", "cp", "ep", "shard", "dp_replicate"):
        if (value := getattr(options, name)) is not None:
            check_count(name, value)
    world = options.nodes * gpus
    for degree, name in ((options.tp * options.pp * options.cp, "--tp x --pp x --cp"), (options.ep, "--ep")):
        if world % degree:
            raise UserError(
                f"{format_count(world, 'process')} are not divisible by {name} = {degree}.",
                f"Request a multiple of {degree} GPUs with --gpus and --nodes, or less parallelism.",
            )
    data = world // (options.tp * options.pp)
    sharding = options.sharding or (engine.sharding if data > 1 else "none")
    if sharding in SHARDINGS and not SHARDINGS[sharding].divides:
        shard, replicate = options.shard or 1, options.dp_replicate or data // (options.shard or 1)
    else:
        shard = options.shard or data // (options.dp_replicate or 1)
        replicate = options.dp_replicate or data // max(shard, 1)
    if shard * replicate != data:
        raise UserError(
            f"--shard {shard} x --dp-replicate {replicate} does not match the {data} data-parallel GPUs with "
            f"--tp {options.tp} and --pp {options.pp}.",
            "Remove one of the two.",
        )
    return shard, replicate, sharding
