"""finetune plan: rank the configurations that train a model within the given goals."""

from __future__ import annotations

import os
import textwrap
from typing import TYPE_CHECKING, Annotated

from estimator.cli import output, unused
from estimator.cli.common import common, option
from estimator.cli.help import GROUPS
from estimator.cli.options import bandwidth_of, expanded, methods_of, names_of, tokens_of
from estimator.cli.plan_options import GoalOptions, JobOptions
from estimator.errors import UserError
from estimator.formatting import format_count
from estimator.terminal import print

if TYPE_CHECKING:
    from estimator.hardware.cluster import Cluster
    from estimator.job import Job, Target
    from estimator.models import ModelSpec
    from estimator.plan import Plan
    from estimator.planning.goals import Goals

EXPENSIVE_USD = 10.0  # price per hour of full training from which LoRA is mentioned
_OUTPUT = GROUPS[-1]


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
        hint = "" if as_json or as_csv else _hint(ranked.best, job, target, goals)
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


def _hint(best: Plan, job: Job, target: Target, goals: Goals) -> str:
    """Name an option that may give a better plan; "" for none."""
    batch = best.layout.global_batch_size
    if job.batch_multiple is not None and goals.by_speed and best.layout.data_parallel == batch > 1:
        return (
            f"The default batch of {batch} sequences allows at most {batch} data-parallel GPUs: a larger "
            "--global-batch-size allows more, and changes the training."
        )
    if target.gpus and target.nodes is None and best.request.nodes > 1:
        count = format_count(best.request.nodes, "node")
        return f"--gpus counts the GPUs of each node; this plan has {count}. Add --nodes 1 for one."
    return _cheaper_method(best, job, target)


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
    from estimator.engines import images, support, vision
    from estimator.job import DEFAULT_BATCH, Job
    from estimator.setup import LlamaAdapter

    unused.check_plan(job_options)
    batch = job_options.global_batch_size
    model = images.trained_model(models.resolve(job_options.model).spec, job_options.resolution)
    vision.check_model(job_options.vision, model)
    return Job(
        model=model,
        method=job_options.method,  # type: ignore[arg-type]
        methods=methods_of(job_options),
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
        quantization=job_options.quantization or "nf4-double",  # type: ignore[arg-type]
        trained_modules=names_of(job_options.trained_modules),
        llama_adapter=LlamaAdapter(
            prompt_length=job_options.adapter_prompt_length, start_layer=job_options.adapter_start_layer
        ),
        packing=False if job_options.packing is None and batch is not None else job_options.packing,
        variable_length=job_options.variable_length,
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
        tensor_parallel=job_options.tp,
        context_parallel=job_options.cp,
        pipeline_parallel=job_options.pp,
        expert_parallel=job_options.ep,
        **support.offload_fields(zero=job_options.zero_offload, fsdp=job_options.fsdp_offload),
    )


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

    unused.check_goals(goal_options)
    if goal_options.interruption_rate is not None and not goal_options.spot:
        raise UserError("--interruption-rate needs --spot.", "Add --spot, or remove --interruption-rate.")
    return Goals(
        deadline_hours=goal_options.deadline_hours,
        budget_usd=goal_options.budget_usd,
        tokens=_count(goal_options.tokens, "--tokens"),
        epochs=goal_options.epochs,
        dataset_tokens=_count(goal_options.dataset_tokens, "--dataset-tokens"),
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


def _count(text: str | None, option: str) -> int | None:
    return None if text is None else round(tokens_of(text, option))
