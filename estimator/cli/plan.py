"""finetune plan: rank the configurations that train a model within the given goals."""

from __future__ import annotations

import os
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from estimator.cli import output
from estimator.cli.common import common, option
from estimator.cli.help import GROUPS, MORE
from estimator.cli.options import SharedOptions, bandwidth_of, expanded, names_of, tokens_of
from estimator.errors import UserError
from estimator.terminal import print
from estimator.vocabulary import (
    METHODS,
    PLANNED_ENGINES,
    LaunchedMethod,
    automatic_methods,
)

if TYPE_CHECKING:
    from estimator.hardware.cluster import Cluster
    from estimator.job import Job, Target
    from estimator.models import ModelSpec
    from estimator.plan import Plan
    from estimator.planning.goals import Goals

_OF_ADAPTERS = ("lora_rank", "lora_targets", "lora_experts", "adapter_only", "trained_modules")
EXPENSIVE_USD = 10.0  # price per hour of full training from which LoRA is mentioned
_TRAINING, _WHERE, _OUTPUT = GROUPS[2:]
_ADAPT, _STEP, _SHARD, _PLACE = (
    MORE + name for name in ("model and adapters", "training step", "sharding and parallelism", "hardware")
)


@dataclass(frozen=True, kw_only=True, slots=True)
class JobOptions(SharedOptions):
    """Options that describe the training job. None: the planner decides."""

    method: Annotated[str, common("method")] = "auto"
    engine: Annotated[str, common("engine", choices=(*PLANNED_ENGINES, "auto"))] = "auto"
    global_batch_size: Annotated[int | None, common("global_batch_size")] = None
    lora_rank: Annotated[int | None, common("lora_rank")] = None
    lora_targets: Annotated[
        str | None,
        option(_ADAPT, "Linear layers with LoRA: comma-separated names, or all-linear (the default)."),
    ] = None
    quantization: Annotated[str | None, common("quantization")] = None
    optimizer: Annotated[str, common("optimizer")] = "adamw"

    precision: Annotated[str, common("precision")] = "auto"
    micro_batch_size: Annotated[int | None, common("micro_batch_size")] = None
    activation_checkpointing: Annotated[bool | None, common("activation_checkpointing")] = None
    packing: Annotated[bool | None, common("packing")] = None
    recompute_what: Annotated[
        str | None,
        option(_STEP, "What activation checkpointing recomputes: full or selective. Default: the fastest."),
    ] = None
    recompute_every: Annotated[int | None, option(_STEP, "Checkpoint one of every N blocks.")] = None
    fp8: Annotated[str, option(_STEP, "Scaling of float8 matrix products (fsdp2): tensorwise, rowwise.")] = (
        "none"
    )
    compile: Annotated[
        bool | None,
        option(
            _STEP,
            "Compile the model with torch.compile. Default: on GPUs where tested.",
            "--compile/--no-compile",
        ),
    ] = None
    liger: Annotated[
        bool | None,
        option(
            _STEP,
            "Use the fused kernels of Liger-Kernel. Default: on GPUs where tested.",
            "--liger/--no-liger",
        ),
    ] = None
    zero_stage: Annotated[int | None, option(_SHARD, "ZeRO stage of DeepSpeed: 0, 1, 2 or 3.")] = None
    fsdp_sharding: Annotated[
        str | None, option(_SHARD, "FSDP2 sharding: full, or grad-op (weights stay gathered).")
    ] = None
    fsdp_replicas: Annotated[int | None, option(_SHARD, "FSDP2 replicas of the model (hybrid sharding).")] = (
        None
    )
    zero_offload: Annotated[
        str, option(_SHARD, "DeepSpeed: keep the optimizer in host memory: none, cpu.")
    ] = "none"
    fsdp_offload: Annotated[str, option(_SHARD, "FSDP2: keep all shards in host memory: none, cpu.")] = "none"
    tp: Annotated[int | None, option(_SHARD, "Degree of tensor parallelism.")] = None
    cp: Annotated[int | None, option(_SHARD, "Degree of context parallelism.")] = None
    pp: Annotated[int | None, option(_SHARD, "Degree of pipeline parallelism.")] = None
    ep: Annotated[int | None, option(_SHARD, "Degree of expert parallelism.")] = None


@dataclass(frozen=True, kw_only=True, slots=True)
class GoalOptions:
    """Options that describe the goal and the hardware."""

    tokens: Annotated[str | None, common("tokens")] = None
    dataset_tokens: Annotated[str | None, option(_TRAINING, "Tokens per epoch, instead of --tokens.")] = None
    epochs: Annotated[int | None, option(_TRAINING, "Number of epochs, with --dataset-tokens.")] = None
    deadline_hours: Annotated[
        float | None, option(_WHERE, "Cheapest plan that finishes within this many hours")
    ] = None
    budget_usd: Annotated[float | None, option(_WHERE, "Fastest plan within this budget in USD")] = None
    prefer: Annotated[str, option(_WHERE, "Rank by price or speed")] = "price"

    gpu: Annotated[str | None, common("gpu")] = None
    instance_type: Annotated[list[str] | None, common("instance_type")] = None
    cloud: Annotated[list[str] | None, common("cloud")] = None
    capacity: Annotated[
        str,
        option(
            _PLACE, "Rank instance types with poor availability last (usual), or treat all equally (any)."
        ),
    ] = "usual"
    spot: Annotated[bool, common("spot")] = False
    interruption_rate: Annotated[
        float | None, option(_PLACE, "With --spot: interruptions per node and hour.")
    ] = None
    nodes: Annotated[int | None, common("nodes")] = None
    gpus: Annotated[int | None, common("gpus")] = None
    max_nodes: Annotated[int | None, option(_PLACE, "Maximum number of nodes. Default: 16.")] = None
    max_gpus: Annotated[int | None, option(_PLACE, "Maximum number of GPUs over all nodes.")] = None
    tight: Annotated[
        bool,
        option(
            _PLACE, "Rank plans with a risk of 2 to 20 % of running out of memory like others.", "--tight"
        ),
    ] = False
    here: Annotated[
        bool | None,
        option(_WHERE, "Plan for this machine's GPUs (default if it has any)", "--here/--no-here"),
    ] = None
    from_cluster: Annotated[
        bool, option(_WHERE, "Plan for the nodes of your Kubernetes cluster.", "--from-cluster")
    ] = False
    context: Annotated[str | None, option(_PLACE, "With --from-cluster: context of the kubeconfig.")] = None
    namespace: Annotated[
        str | None,
        option(
            _PLACE,
            "With --from-cluster: namespace whose quotas apply. Default: METAFLOW_KUBERNETES_NAMESPACE.",
        ),
    ] = None
    hardware: Annotated[Path | None, option(_PLACE, "CSV file with your own GPUs and machines.")] = None
    busbw_intra: Annotated[float | None, option(_PLACE, "Measured bus bandwidth inside a node, in GB/s.")] = (
        None
    )
    busbw_inter: Annotated[
        float | None, option(_PLACE, "Measured bus bandwidth between nodes, in GB/s per GPU.")
    ] = None
    calibration: Annotated[
        bool,
        option(
            _PLACE,
            "Correct predictions by the measurements of finished runs.",
            "--calibration/--no-calibration",
        ),
    ] = True


@expanded
def plan(
    job_options: JobOptions,
    goal_options: GoalOptions,
    top: Annotated[int, option(_OUTPUT, "Number of plans to show.")] = 5,
    verbose: Annotated[bool, common("verbose", "--verbose", "-v")] = False,
    as_json: Annotated[
        bool, option(_OUTPUT, "Print plans and rejected configurations as JSON.", "--json")
    ] = False,
    as_csv: Annotated[bool, option(_OUTPUT, "Print one CSV row per plan.", "--csv")] = False,
) -> None:
    """Rank the configurations that train a model within the given goals."""
    from estimator import calibration, hardware
    from estimator.cli.plan_answer import show
    from estimator.planning.obstacles import explain
    from estimator.planning.planner import plans
    from estimator.planning.rows import row_of
    from estimator.planning.summary import MORE, WIDTH, render_summary

    output.one_format(json=as_json, csv=as_csv)
    catalogue = hardware.catalogue(goal_options.hardware)
    for warning in catalogue.warnings:
        output.note(warning)
    with hardware.using(catalogue):
        corrections, problems = calibration.load() if goal_options.calibration else (None, ())
        for problem in problems:
            output.note(problem)
        job, target, goals = job_from(job_options), target_from(goal_options), goals_from(goal_options)
        bandwidth = bandwidth_of(goal_options.busbw_intra, goal_options.busbw_inter)
        try:
            ranked = plans(job, target, goals, top, calibration=corrections, bandwidth=bandwidth)
        except UserError as error:
            raise error if goals.cluster is None else explain(error, job, target, goals.cluster) from None
        old = hardware.old_prices(
            item.request.instance_type or "" for item in ranked.plans if item.prediction.price_source
        )
        command = _command(ranked.best, job, job_options.model, goal_options, goals)
        hint = "" if as_json or as_csv else _cheaper_method(ranked.best, job, target)
    if old:
        output.note(old)
    rows = [row_of(*item) for item in enumerate(ranked.plans, 1)]
    if as_json:
        output.print_json(ranked.to_dict() | {"summary": rows, "command": command})
    elif as_csv:
        output.print_csv(rows)
    else:
        if verbose:
            show(ranked)
        else:
            if ranked.obstacle:
                print(textwrap.fill(ranked.obstacle, WIDTH))
            print(render_summary(ranked.best, ranked.plans[1:]))
            for paragraph in filter(None, (ranked.faster, MORE)):
                print(f"\n{textwrap.fill(paragraph, WIDTH)}")
        if hint:
            print(f"\n{textwrap.fill(hint, WIDTH)}")
        if command is not None:
            output.console().print(f"\nTo run the first: {command}", markup=False, soft_wrap=True)


def _cheaper_method(best: Plan, job: Job, target: Target) -> str:
    """Mention LoRA if full training was chosen automatically, on expensive machines; "" otherwise.

    LoRA is not planned here: a second search would double the time of the command.
    """
    hourly = best.prediction.usd_per_hour
    if job.method != "auto" or best.method != "full" or target.gpu or target.gpus:
        return ""
    if hourly is None or hourly < EXPENSIVE_USD:
        return ""
    return "LoRA needs less memory than full training, and often cheaper GPUs: compare with --method lora."


def job_from(job_options: JobOptions) -> Job:
    from estimator import models
    from estimator.engines import images, vision
    from estimator.job import DEFAULT_BATCH, Job
    from estimator.setup import LlamaAdapter

    batch = job_options.global_batch_size
    model = images.trained_model(models.resolve(job_options.model).spec, job_options.resolution)
    vision.check_model(job_options.vision, model)
    return Job(
        model=model,
        method=job_options.method,  # type: ignore[arg-type]
        methods=_methods(job_options),
        engine=job_options.engine,  # type: ignore[arg-type]
        task=images.task_for(model, job_options.task),  # type: ignore[arg-type]
        seq_len=images.length_of(model, job_options.seq_len),
        global_batch_size=DEFAULT_BATCH if batch is None else batch,
        batch_multiple=1 if batch is None else None,
        micro_batch_size=job_options.micro_batch_size,
        optimizer=job_options.optimizer,  # type: ignore[arg-type]
        precision=job_options.precision,  # type: ignore[arg-type]
        activation_checkpointing=job_options.activation_checkpointing,
        lora_rank=8 if job_options.lora_rank is None else job_options.lora_rank,
        lora_targets=_targets(job_options.lora_targets or "all-linear", model),
        lora_experts=job_options.lora_experts,
        adapter_only=job_options.adapter_only,
        quantization=_quantization(job_options),  # type: ignore[arg-type]
        trained_modules=names_of(job_options.trained_modules),
        llama_adapter=LlamaAdapter(
            prompt_length=job_options.adapter_prompt_length, start_layer=job_options.adapter_start_layer
        ),
        packing=False if job_options.packing is None and batch is not None else job_options.packing,
        recompute=job_options.recompute_what,  # type: ignore[arg-type]
        recompute_every=job_options.recompute_every,
        fp8=job_options.fp8,  # type: ignore[arg-type]
        compile=job_options.compile,
        liger=job_options.liger,
        vision=job_options.vision,  # type: ignore[arg-type]
        images_per_row=job_options.images_per_row,
        image_size=job_options.image_size,
        optimizer_in_backward=job_options.optimizer_in_backward,
        zero_stage=job_options.zero_stage,
        fsdp_sharding=job_options.fsdp_sharding,  # type: ignore[arg-type]
        replicas=job_options.fsdp_replicas,
        offload=_offload(job_options),  # type: ignore[arg-type]
        tensor_parallel=job_options.tp,
        context_parallel=job_options.cp,
        pipeline_parallel=job_options.pp,
        expert_parallel=job_options.ep,
    )


def _offload(job_options: JobOptions) -> str:
    offloads = (job_options.zero_offload, job_options.fsdp_offload)
    return next((value for value in offloads if value != "none"), "none")


def _methods(job_options: JobOptions) -> tuple[LaunchedMethod, ...]:
    """Return the methods that "auto" may take: those to which all options that are set apply."""
    is_set = any(getattr(job_options, name) not in (None, False, "") for name in _OF_ADAPTERS)
    return automatic_methods(low_rank=is_set, quantized=job_options.quantization is not None)


def _quantization(job_options: JobOptions) -> str:
    if (
        job_options.quantization
        and job_options.method in METHODS
        and not METHODS[job_options.method].quantized
    ):
        raise UserError(
            f"--quantization {job_options.quantization} needs method qlora, not {job_options.method}.",
            "Use --method qlora, or remove --quantization.",
        )
    return job_options.quantization or "nf4-double"


def _targets(text: str, model: ModelSpec) -> tuple[str, ...]:
    if text == "all-linear":
        return tuple(model.projections)
    return names_of(text)


def target_from(goal_options: GoalOptions) -> Target:
    from estimator.job import Target

    is_local = _plans_here(goal_options)
    kind = "local" if is_local else "kubernetes" if goal_options.from_cluster else "catalogue"
    if is_local:
        from estimator.hardware import local_machine

    return Target(
        kind=kind,  # type: ignore[arg-type]
        machine=local_machine.detect() if is_local else None,
        nodes=goal_options.nodes,
        gpus=goal_options.gpus,
        gpu=goal_options.gpu,
        capacity=goal_options.capacity,  # type: ignore[arg-type]
        tight=goal_options.tight,
    )


def _plans_here(options: GoalOptions) -> bool:
    """Return whether to plan for this machine: with --here, or if it has GPUs and no option names others."""
    elsewhere = {
        "instance-type": options.instance_type,
        "cloud": options.cloud,
        "spot": options.spot,
        "interruption-rate": options.interruption_rate,
        "max-nodes": options.max_nodes,
        "max-gpus": options.max_gpus,
        "from-cluster": options.from_cluster,
        "budget-usd": options.budget_usd,
    }
    named = next((name for name, value in elsewhere.items() if value), None)
    if options.here and named:
        raise UserError(f"--here and --{named} contradict each other.", "Remove one of them.")
    if options.here is not None:
        return options.here
    if named or options.gpu or options.gpus or options.nodes or options.hardware:
        return False
    from estimator.hardware import local_machine

    return local_machine.has_gpus()


def goals_from(goal_options: GoalOptions) -> Goals:
    from estimator.planning.goals import Goals

    if goal_options.interruption_rate is not None and not goal_options.spot:
        raise UserError("--interruption-rate needs --spot.", "Add --spot, or remove --interruption-rate.")
    return Goals(
        deadline_hours=goal_options.deadline_hours,
        budget_usd=goal_options.budget_usd,
        tokens=_count(goal_options.tokens),
        epochs=goal_options.epochs,
        dataset_tokens=_count(goal_options.dataset_tokens),
        prefer=goal_options.prefer,  # type: ignore[arg-type]
        clouds=tuple(goal_options.cloud or ()),
        instance_types=tuple(goal_options.instance_type or ()),
        spot=goal_options.spot,
        interruption_rate=goal_options.interruption_rate,
        cluster=_cluster(goal_options),
        max_nodes=goal_options.max_nodes,
        max_gpus=goal_options.max_gpus,
    )


def _cluster(goal_options: GoalOptions) -> Cluster | None:
    for name in ("context", "namespace"):
        if getattr(goal_options, name) is not None and not goal_options.from_cluster:
            raise UserError(f"--{name} needs --from-cluster.", f"Add --from-cluster, or remove --{name}.")
    if not goal_options.from_cluster:
        return None
    from estimator.hardware.cluster.inventory import read_cluster
    from estimator.hardware.cluster.pods import PodRules
    from estimator.planning.run_command import DEFAULT_NAMESPACE, NAMESPACE_VARIABLE

    namespace = goal_options.namespace or os.environ.get(NAMESPACE_VARIABLE) or DEFAULT_NAMESPACE
    cluster = read_cluster(goal_options.context, rules=PodRules(namespace=namespace), gpu=goal_options.gpu)
    for line in cluster.notes:
        output.note(line)
    return cluster


def _command(plan: Plan, job: Job, model: str, goal_options: GoalOptions, goals: Goals) -> str | None:
    """Return the command that runs the plan on its cluster or machine; None for a plan of the catalogue."""
    if goals.cluster is None and plan.target == "catalogue":
        return None
    from estimator.planning.run_command import run_command

    command = run_command(
        plan, job, model, goals.cluster, namespace=goal_options.namespace, hardware_file=goal_options.hardware
    )
    if goal_options.context is None:
        return command
    return f"kubectl config use-context {goal_options.context} && {command}"


def _count(text: str | None) -> int | None:
    return None if text is None else round(tokens_of(text))
