"""finetune plan: the best configurations for a model, from goals to a ranked list."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from estimator.cli import output
from estimator.cli.options import expanded, tokens_of
from estimator.errors import UserError
from estimator.setup import DEFAULT_SEQ_LEN

if TYPE_CHECKING:
    from estimator.hardware.cluster import Cluster
    from estimator.job import Job, Target
    from estimator.models import ModelSpec
    from estimator.plan import Plan
    from estimator.planning.goals import Goals
    from estimator.throughput import MeasuredBandwidth

DEFAULT_BATCH = 16  # as launchers/settings.py
_WHAT, _GOALS, _WHERE, _HOW, _ANSWER = ("What is trained", "Goals", "Where", "How", "Answer")


@dataclass(frozen=True, kw_only=True, slots=True)
class JobOptions:
    """What is to be trained. None is: for the planner to decide."""

    model: Annotated[
        str,
        Option("--model", "-m", help="A name of `finetune models`, a Hugging Face id, a directory or s3://bucket/path.",
               rich_help_panel=_WHAT),
    ]  # fmt: skip
    method: Annotated[
        str,
        Option(help="full, lora, qlora, dora, adapter-v1, adapter-v2; auto: the first of full, lora, qlora "
                    "that will do.",
               rich_help_panel=_WHAT),
    ] = "auto"  # fmt: skip
    engine: Annotated[
        str,
        Option(help="torchtune, deepspeed, fsdp2, trl (task grpo); to plan only: torchtitan, megatron. auto: "
                    "the first of the first four that can train the model.", rich_help_panel=_WHAT),
    ] = "auto"  # fmt: skip
    task: Annotated[
        str,
        Option(
            help="sft, pretrain, dpo, orpo, simpo, kto, reward, grpo; of images text-to-image.",
            rich_help_panel=_WHAT,
        ),
    ] = "sft"
    seq_len: Annotated[
        int | None, Option(help=f"Tokens of a sequence; {DEFAULT_SEQ_LEN:,}.", rich_help_panel=_WHAT)
    ] = None
    resolution: Annotated[
        int | None,
        Option(help="Pixels of an image's side; as the model was published for.", rich_help_panel=_WHAT),
    ] = None
    global_batch_size: Annotated[
        int, Option(help="Sequences of an optimizer step, over all GPUs.", rich_help_panel=_WHAT)
    ] = DEFAULT_BATCH
    lora_rank: Annotated[
        int, Option("--lora-rank", "--rank", help="Of the adapters.", rich_help_panel=_WHAT)
    ] = 8
    lora_targets: Annotated[
        str, Option(help="Names of linear layers with commas between, or `all`.", rich_help_panel=_WHAT)
    ] = "all"
    lora_experts: Annotated[
        bool, Option("--lora-experts", help="Adapters on experts too.", rich_help_panel=_WHAT)
    ] = False
    adapter_only: Annotated[
        bool,
        Option("--adapter-only", help="The adapter alone is handed over, not merged.", rich_help_panel=_WHAT),
    ] = False
    quantization: Annotated[
        str | None,
        Option(help="Of qlora's base: nf4-double, nf4, int8.", rich_help_panel=_WHAT),
    ] = None
    trained_modules: Annotated[
        str, Option(help="Trained whole beside LoRA: embed_tokens, lm_head, norms.", rich_help_panel=_WHAT)
    ] = ""
    adapter_prompt_length: Annotated[
        int, Option(help="Of a LLaMA-Adapter: prompt vectors of a block.", rich_help_panel=_WHAT)
    ] = 10
    adapter_start_layer: Annotated[
        int, Option(help="The first block with a prompt.", rich_help_panel=_WHAT)
    ] = 2
    optimizer: Annotated[
        str, Option(help="adamw, adamw8bit, paged-adamw, adafactor, sgd, muon...", rich_help_panel=_WHAT)
    ] = "adamw"

    precision: Annotated[str, Option(help="auto, bf16, bf16-mixed, fp32.", rich_help_panel=_HOW)] = "auto"
    micro_batch_size: Annotated[
        int | None, Option(help="Sequences of a GPU and a forward pass.", rich_help_panel=_HOW)
    ] = None
    checkpointing: Annotated[
        bool | None,
        Option("--checkpointing/--no-checkpointing", help="Of activations.", rich_help_panel=_HOW),
    ] = None
    packing: Annotated[
        bool, Option("--packing", help="Several samples a sequence.", rich_help_panel=_HOW)
    ] = False
    recompute_what: Annotated[
        str, Option(help="With checkpointing: full, selective.", rich_help_panel=_HOW)
    ] = "full"
    recompute_every: Annotated[
        int, Option(help="With checkpointing: one block of so many.", rich_help_panel=_HOW)
    ] = 1
    fp8: Annotated[
        str, Option(help="Matrix products in float8 (fsdp2): tensorwise, rowwise.", rich_help_panel=_HOW)
    ] = "none"
    compile: Annotated[bool, Option("--compile", help="torch.compile.", rich_help_panel=_HOW)] = False
    liger: Annotated[bool, Option("--liger", help="Liger-Kernel's kernels.", rich_help_panel=_HOW)] = False
    optimizer_in_backward: Annotated[
        bool,
        Option("--optimizer-in-backward", help="Each gradient is used at once.", rich_help_panel=_HOW),
    ] = False
    zero_stage: Annotated[int | None, Option(help="DeepSpeed's.", rich_help_panel=_HOW)] = None
    fsdp_sharding: Annotated[
        str | None, Option(help="FSDP2's: full, grad-op (weights stay gathered).", rich_help_panel=_HOW)
    ] = None
    fsdp_replicas: Annotated[
        int | None, Option(help="FSDP2's copies of the model, each divided.", rich_help_panel=_HOW)
    ] = None
    offload: Annotated[
        str,
        Option(help="cpu: DeepSpeed's optimizer, or all that FSDP2 divides. none.", rich_help_panel=_HOW),
    ] = "none"
    tp: Annotated[int | None, Option(help="Tensor parallel.", rich_help_panel=_HOW)] = None
    cp: Annotated[int | None, Option(help="Context parallel.", rich_help_panel=_HOW)] = None
    pp: Annotated[int | None, Option(help="Pipeline parallel.", rich_help_panel=_HOW)] = None
    ep: Annotated[int | None, Option(help="Expert parallel.", rich_help_panel=_HOW)] = None


@dataclass(frozen=True, kw_only=True, slots=True)
class GoalOptions:
    """What the plan is to reach, and where it may run."""

    tokens: Annotated[str | None, Option(help="To train on: 250M, 1.5B.", rich_help_panel=_GOALS)] = None
    dataset_tokens: Annotated[
        str | None, Option(help="Of one epoch, instead of --tokens.", rich_help_panel=_GOALS)
    ] = None
    epochs: Annotated[int | None, Option(help="With --dataset-tokens.", rich_help_panel=_GOALS)] = None
    deadline_hours: Annotated[
        float | None, Option(help="The cheapest plan that is done by then.", rich_help_panel=_GOALS)
    ] = None
    budget_usd: Annotated[
        float | None, Option(help="The fastest plan that costs no more.", rich_help_panel=_GOALS)
    ] = None
    prefer: Annotated[
        str, Option(help="What decides without deadline and budget: price, speed.", rich_help_panel=_GOALS)
    ] = "price"

    gpu: Annotated[str | None, Option(help="A name of `finetune gpus`.", rich_help_panel=_WHERE)] = None
    instance_type: Annotated[
        list[str] | None, Option(help="A machine type; may be repeated.", rich_help_panel=_WHERE)
    ] = None
    cloud: Annotated[list[str] | None, Option(help="May be repeated.", rich_help_panel=_WHERE)] = None
    capacity: Annotated[
        str,
        Option(help="usual: what can rarely be had on demand comes last; any: it competes like the rest.",
               rich_help_panel=_WHERE),
    ] = "usual"  # fmt: skip
    spot: Annotated[
        bool, Option("--spot", help="On spot machines, at their prices.", rich_help_panel=_WHERE)
    ] = False
    interruption_rate: Annotated[
        float | None,
        Option(help="With --spot: how often a node is taken away in an hour.", rich_help_panel=_WHERE),
    ] = None
    nodes: Annotated[int | None, Option(help="Exactly so many machines.", rich_help_panel=_WHERE)] = None
    gpus: Annotated[int | None, Option(help="Of each machine.", rich_help_panel=_WHERE)] = None
    max_nodes: Annotated[int | None, Option(help="At most so many machines; 16.", rich_help_panel=_WHERE)] = (
        None
    )
    max_gpus: Annotated[int | None, Option(help="Of all machines.", rich_help_panel=_WHERE)] = None
    from_cluster: Annotated[
        bool,
        Option("--from-cluster", help="What your Kubernetes cluster has and could add.",
               rich_help_panel=_WHERE),
    ] = False  # fmt: skip
    context: Annotated[
        str | None, Option(help="With --from-cluster: the kubeconfig's context.", rich_help_panel=_WHERE)
    ] = None
    namespace: Annotated[
        str | None,
        Option(help="With --from-cluster: whose quotas count; METAFLOW_KUBERNETES_NAMESPACE, else default.",
               rich_help_panel=_WHERE),
    ] = None  # fmt: skip
    hardware: Annotated[
        Path | None, Option(help="A CSV of your own GPUs and machines.", rich_help_panel=_WHERE)
    ] = None
    busbw_intra: Annotated[
        float | None, Option(help="Measured inside a node, GB/s.", rich_help_panel=_WHERE)
    ] = None
    busbw_inter: Annotated[
        float | None, Option(help="Measured between nodes, GB/s of a GPU.", rich_help_panel=_WHERE)
    ] = None
    calibration: Annotated[
        bool,
        Option("--calibration/--no-calibration", help="Use what finished runs have measured.",
               rich_help_panel=_WHERE),
    ] = True  # fmt: skip


@expanded
def plan(
    wanted: JobOptions,
    limits: GoalOptions,
    top: Annotated[int, Option(help="Plans to show.", rich_help_panel=_ANSWER)] = 5,
    as_json: Annotated[
        bool, Option("--json", help="Plans and rejections, in order.", rich_help_panel=_ANSWER)
    ] = False,
    as_csv: Annotated[bool, Option("--csv", help="A row for each plan.", rich_help_panel=_ANSWER)] = False,
) -> None:
    """The best configurations for a model, from goals to a ranked list."""
    from estimator import calibration, hardware
    from estimator.cli.plan_answer import show
    from estimator.planning.obstacles import explain
    from estimator.planning.planner import plans
    from estimator.planning.rows import row_of

    output.one_format(json=as_json, csv=as_csv)
    found = hardware.catalogue(limits.hardware)
    for warning in found.warnings:
        output.note(warning)
    with hardware.using(found):
        known, problems = calibration.load() if limits.calibration else (None, ())
        for problem in problems:
            output.note(problem)
        job, target, goals = _job(wanted), _target(limits), _goals(limits)
        try:
            ranked = plans(job, target, goals, top, calibration=known, bandwidth=_bandwidth(limits))
        except UserError as error:
            raise error if goals.cluster is None else explain(error, job, target, goals.cluster) from None
        old = hardware.old_prices(
            item.request.instance_type or "" for item in ranked.plans if item.prediction.price_source
        )
        command = _command(ranked.best, job, wanted.model, limits, goals)
    if old:
        output.note(old)
    rows = [row_of(*item) for item in enumerate(ranked.plans, 1)]
    if as_json:
        output.print_json(ranked.to_dict() | {"summary": rows, "command": command})
    elif as_csv:
        output.print_csv(rows)
    else:
        show(ranked)
        if command is not None:
            output.console().print(f"\nTo run the first: {command}", markup=False, soft_wrap=True)


def _job(wanted: JobOptions) -> Job:
    from estimator import models
    from estimator.job import Job
    from estimator.planning import images

    model = models.resolve(wanted.model).spec
    return Job(
        model=model,
        method=wanted.method,  # type: ignore[arg-type]
        engine=wanted.engine,  # type: ignore[arg-type]
        task=images.task_for(model, wanted.task),  # type: ignore[arg-type]
        seq_len=images.length_of(model, wanted.seq_len, wanted.resolution),
        global_batch_size=wanted.global_batch_size,
        micro_batch_size=wanted.micro_batch_size,
        optimizer=wanted.optimizer,  # type: ignore[arg-type]
        precision=wanted.precision,  # type: ignore[arg-type]
        activation_checkpointing=wanted.checkpointing,
        lora_rank=wanted.lora_rank,
        lora_targets=_targets(wanted.lora_targets, model),
        lora_experts=wanted.lora_experts,
        adapter_only=wanted.adapter_only,
        quantization=_quantization(wanted),  # type: ignore[arg-type]
        trained_modules=_names(wanted.trained_modules),
        adapter_prompt_length=wanted.adapter_prompt_length,
        adapter_start_layer=wanted.adapter_start_layer,
        packing=wanted.packing,
        recompute=wanted.recompute_what,  # type: ignore[arg-type]
        recompute_every=wanted.recompute_every,
        fp8=wanted.fp8,  # type: ignore[arg-type]
        compile=wanted.compile,
        liger=wanted.liger,
        optimizer_in_backward=wanted.optimizer_in_backward,
        zero_stage=wanted.zero_stage,
        fsdp_sharding=wanted.fsdp_sharding,  # type: ignore[arg-type]
        replicas=wanted.fsdp_replicas,
        offload=wanted.offload,  # type: ignore[arg-type]
        tensor_parallel=wanted.tp,
        context_parallel=wanted.cp,
        pipeline_parallel=wanted.pp,
        expert_parallel=wanted.ep,
    )


def _quantization(wanted: JobOptions) -> str:
    if wanted.quantization and wanted.method not in ("qlora", "auto"):
        raise UserError(
            f"--quantization {wanted.quantization} is of qlora's base; the method is {wanted.method}.",
            "Use --method qlora, or leave --quantization out.",
        )
    return wanted.quantization or "nf4-double"


def _targets(text: str, model: ModelSpec) -> tuple[str, ...]:
    if text == "all":
        return tuple(model.projections)
    return _names(text)


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _target(limits: GoalOptions) -> Target:
    from estimator.job import Target

    kind = "kubernetes" if limits.from_cluster else "catalogue"
    return Target(
        kind=kind,  # type: ignore[arg-type]
        nodes=limits.nodes,
        gpus=limits.gpus,
        gpu=limits.gpu,
        capacity=limits.capacity,  # type: ignore[arg-type]
    )


def _goals(limits: GoalOptions) -> Goals:
    from estimator.planning.goals import Goals

    return Goals(
        deadline_hours=limits.deadline_hours,
        budget_usd=limits.budget_usd,
        tokens=_count(limits.tokens),
        epochs=limits.epochs,
        dataset_tokens=_count(limits.dataset_tokens),
        prefer=limits.prefer,  # type: ignore[arg-type]
        clouds=tuple(limits.cloud or ()),
        instance_types=tuple(limits.instance_type or ()),
        spot=limits.spot,
        interruption_rate=limits.interruption_rate,
        cluster=_cluster(limits),
        max_nodes=limits.max_nodes,
        max_gpus=limits.max_gpus,
    )


def _cluster(limits: GoalOptions) -> Cluster | None:
    for name in ("context", "namespace"):
        if getattr(limits, name) is not None and not limits.from_cluster:
            raise UserError(
                f"--{name} goes with --from-cluster.", f"Add --from-cluster, or leave --{name} out."
            )
    if not limits.from_cluster:
        return None
    from estimator.hardware.inventory import PodRules, read_cluster
    from estimator.planning.run_command import DEFAULT_NAMESPACE, NAMESPACE_VARIABLE

    namespace = limits.namespace or os.environ.get(NAMESPACE_VARIABLE) or DEFAULT_NAMESPACE
    cluster = read_cluster(limits.context, rules=PodRules(namespace=namespace))
    for line in cluster.notes:
        output.note(line)
    return cluster


def _command(plan: Plan, job: Job, model: str, limits: GoalOptions, goals: Goals) -> str | None:
    """What runs the plan where it is for a cluster; the job's method is decided by then."""
    if goals.cluster is None:
        return None
    from estimator.planning.run_command import run_command

    command = run_command(
        plan, job, model, goals.cluster, namespace=limits.namespace, hardware_file=limits.hardware
    )
    if limits.context is None:
        return command
    return f"kubectl config use-context {limits.context} && {command}"


def _count(text: str | None) -> int | None:
    return None if text is None else round(tokens_of(text))


def _bandwidth(limits: GoalOptions) -> MeasuredBandwidth | None:
    if limits.busbw_intra is None and limits.busbw_inter is None:
        return None
    from datetime import date

    from estimator.throughput import MeasuredBandwidth

    return MeasuredBandwidth(
        intra_node_gbytes_per_s=limits.busbw_intra,
        inter_node_gbytes_per_s=limits.busbw_inter,
        source="given by --busbw-intra and --busbw-inter",
        date=date.today().isoformat(),
    )
