"""Stages of rejection sampling before and after training: batch, GPUs, nodes, hours and price of each.

Each node loads the model once, on the smallest number of the training's GPUs that hold it with the answers to
one prompt. Nodes only share the prompts, so as many generate concurrently as training has GPUs for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from estimator import hardware
from estimator.errors import UserError
from estimator.hardware import Gpu
from estimator.inference.serving import heads_divide
from estimator.memory.evaluation import inference_gpus
from estimator.memory.generation import Batch, Device, largest_batch
from estimator.models import ModelSpec
from estimator.plan import MIB, Generation, Plan, Request, Stage
from estimator.planning.step_requests import MEMORY_OUTSIDE_RANKS
from estimator.throughput.generation import balanced_sequences, forward_seconds, generation_speed

# A CPU computes tokens sequentially: larger batches gain nothing
CPU_SEQUENCES = 64
CPU_BATCH_TOKENS = 16384
UNKNOWN_SEQUENCES = 64  # for a GPU with unknown ratio of FLOP/s and memory bandwidth

Range = tuple[float, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """Number and length of the answers to generate and to score."""

    prompts: int | None  # None: unknown before the dataset is fetched
    held_out: int | None  # part of ``prompts``, sampled again with the finished model
    answers: int  # per prompt
    prompt_tokens: int  # of the longest prompt
    new_tokens: int  # of the longest answer
    top_p: float = 1.0
    reward_model: ModelSpec | None = None  # model that scores the answers; None: unknown
    by_function: bool = False  # scored on CPUs
    nodes: int | None = None  # requested by the user; None: planned
    heads_shared: bool = False  # GPUs share the heads of each block (vLLM), not the blocks


def plan_generation(plan: Plan, model: ModelSpec, sampling: Sampling) -> Generation:
    """Plan batch, requests, hours and price of the stages, on the plan's instance type."""
    device, gpu = plan.layout.device, _gpu(plan)
    base = plan.evaluate or replace(plan.request, nodes=1)
    gpus, sequences, fits = _batch(plan, model, sampling, base)
    batch_tokens = sequences * (sampling.prompt_tokens + sampling.new_tokens)
    request = _with_gpus(base, gpus)
    nodes = sampling.nodes or _nodes(plan, sampling, gpus, sequences)
    generation_hours = _hours(
        plan, _sampling_seconds(model, gpu, sampling, sampling.prompts, sequences, nodes)
    )
    evaluation_hours = _hours(plan, _sampling_seconds(model, gpu, sampling, sampling.held_out, sequences, 1))
    basis = generation_speed(model, gpu, _as_batch(sampling, sequences)).basis
    score, score_seconds, score_basis = _score(plan, gpu, sampling, base)
    evaluation_score_seconds = (
        (0.0, 0.0) if sampling.by_function else _score_seconds(gpu, sampling, sampling.held_out)
    )
    comparison_hours = _sum(
        (
            evaluation_hours,
            None
            if evaluation_score_seconds is None
            else (evaluation_score_seconds[0] / 3600, evaluation_score_seconds[1] / 3600),
        )
    )
    stages = [
        Stage(
            name="generate",
            request=request,
            nodes=nodes,
            hours=generation_hours,
            usd=_usd(plan, request, nodes, generation_hours),
            basis=basis,
        ),
        Stage(
            name="score",
            request=score,
            hours=(score_hours := _hours(plan, score_seconds)),
            usd=_usd(plan, score, 1, score_hours),
            basis=score_basis,
        ),
        Stage(
            name="compare",
            request=request if score.gpus_per_node <= gpus else score,
            hours=comparison_hours,
            usd=_usd(plan, request, 1, comparison_hours),
            basis="" if comparison_hours is None else basis,
        ),
    ]
    on_gpus = device == "cuda"
    return Generation(
        batch_sequences=max(sequences, _max_useful_batch(gpu) if on_gpus else CPU_SEQUENCES),
        batch_tokens=batch_tokens if on_gpus else max(batch_tokens, CPU_BATCH_TOKENS),
        prompt_tokens=sampling.prompt_tokens,
        fits=fits,
        stages=tuple(stages),
    )


def total(plan: Plan) -> tuple[Range | None, Range | None, tuple[str, ...]]:
    """Return (hours, USD) of training and all stages, and the stages that are not included.

    None if unknown; the price also if a stage with known hours has no price.
    """
    stages = plan.generation.stages if plan.generation is not None else ()
    hours, usd = plan.prediction.hours, plan.prediction.usd
    parts: list[tuple[str, Range | None, Range | None]] = [
        *((stage.name, stage.hours, stage.usd) for stage in stages),
        ("train", _point(hours), _point(usd)),
    ]
    known_parts = [part for part in parts if part[1] is not None]
    missing = tuple(name for name, known_range, _ in parts if known_range is None)
    if not known_parts:
        return None, None, missing
    return _sum([part[1] for part in known_parts]), _sum([part[2] for part in known_parts]), missing


def _point(value: float | None) -> Range | None:
    return None if value is None else (value, value)


def _gpu(plan: Plan) -> Gpu | None:
    """Return the plan's GPU; None on CPUs, and for an unknown one."""
    if plan.layout.device == "cpu" or plan.request.gpu_type is None:
        return None
    try:
        return hardware.gpu(plan.request.gpu_type)
    except UserError:
        return None


def _batch(plan: Plan, model: ModelSpec, sampling: Sampling, base: Request) -> tuple[int, int, bool | None]:
    """Return GPUs per copy of the model, answers per batch, and whether the answers to one prompt fit.

    All answers to a prompt are generated together. If they do not fit on all GPUs of a node, prompts are
    tried one by one, as most are shorter than the longest.
    """
    device: Device = plan.layout.device
    on_gpus = device == "cuda"
    capacity = plan.prediction.memory.capacity_bytes
    if not on_gpus:
        capacity = base.memory_mib * MIB - MEMORY_OUTSIDE_RANKS
    if capacity is None:
        return base.gpus_per_node, sampling.answers, None
    max_sequences = _max_useful_batch(_gpu(plan)) if on_gpus else CPU_SEQUENCES
    if not on_gpus:
        max_sequences = min(max_sequences, CPU_BATCH_TOKENS // (sampling.prompt_tokens + sampling.new_tokens))
    first, last = base.gpus_per_node, max(plan.request.gpus_per_node, base.gpus_per_node)
    counts = [count for count in range(max(first, 1), max(last, 1) + 1) if _can_share(model, count, sampling)]
    for gpus in counts:
        batch = largest_batch(
            model,
            capacity,
            prompt_tokens=sampling.prompt_tokens,
            new_tokens=sampling.new_tokens,
            gpus=gpus if on_gpus else 1,
            device=device,
            top_p=sampling.top_p,
            max_sequences=max(max_sequences, sampling.answers),
        )
        if batch >= sampling.answers:
            complete_groups = batch // sampling.answers * sampling.answers
            return (gpus if on_gpus else 0), complete_groups, True
    return (counts[-1] if counts and on_gpus else last), sampling.answers, False


def _can_share(model: ModelSpec, gpus: int, sampling: Sampling) -> bool:
    """Return whether this number of GPUs can share one copy."""
    return not sampling.heads_shared or heads_divide(model, gpus)


def _max_useful_batch(gpu: Gpu | None) -> int:
    """Return the number of answers per batch beyond which throughput does not grow."""
    return (balanced_sequences(gpu) if gpu is not None else None) or UNKNOWN_SEQUENCES


def _with_gpus(base: Request, gpus: int) -> Request:
    """Return the request with another number of GPUs, and cores and memory in proportion."""
    if not base.gpus_per_node or gpus == base.gpus_per_node:
        return replace(base, nodes=1)
    return replace(
        base,
        nodes=1,
        gpus_per_node=gpus,
        cpu=base.cpu * gpus // base.gpus_per_node,
        memory_mib=base.memory_mib * gpus // base.gpus_per_node,
        shared_memory_mib=base.shared_memory_mib * gpus // base.gpus_per_node,
    )


def _nodes(plan: Plan, sampling: Sampling, gpus: int, sequences: int) -> int:
    """Return the number of nodes: copies of the model that fit on the training's GPUs (on CPUs: nodes).

    Each copy has at least one batch. 1 on a local machine, where one process sees all GPUs.
    """
    if plan.target in ("local", "allocation"):
        return 1
    request = plan.request
    copies = request.nodes * request.gpus_per_node // gpus if gpus else request.nodes
    if sampling.prompts is not None:
        copies = min(copies, _batches(sampling, sampling.prompts, sequences))
    return max(copies, 1)


def _batches(sampling: Sampling, prompts: int, sequences: int) -> int:
    return -(-prompts // max(sequences // sampling.answers, 1))


def _as_batch(sampling: Sampling, sequences: int) -> Batch:
    return Batch(sequences=sequences, prompt_tokens=sampling.prompt_tokens, new_tokens=sampling.new_tokens)


def _sampling_seconds(
    model: ModelSpec, gpu: Gpu | None, sampling: Sampling, prompts: int | None, sequences: int, nodes: int
) -> Range | None:
    """Return the seconds of the node with the most batches, assuming answers of maximum length."""
    if prompts is None:
        return None
    if prompts == 0:
        return 0.0, 0.0
    batch = min(sequences, prompts * sampling.answers)
    batch_seconds = generation_speed(model, gpu, _as_batch(sampling, batch)).seconds
    if batch_seconds is None:
        return None
    node_batches = -(-_batches(sampling, prompts, sequences) // nodes)
    return node_batches * batch_seconds[0], node_batches * batch_seconds[1]


def _score(
    plan: Plan, gpu: Gpu | None, sampling: Sampling, base: Request
) -> tuple[Request, Range | None, str]:
    """Return the request of the scoring, its seconds, and their basis."""
    if sampling.by_function:
        # On a local machine, there is nothing else to request
        return plan.prepare or replace(base, nodes=1), None, "the function's own time"
    reward, capacity = sampling.reward_model, plan.prediction.memory.capacity_bytes
    if reward is None:
        return replace(base, nodes=1), None, "the reward model is read when the run begins"
    request = replace(base, nodes=1)
    if plan.layout.device == "cuda" and capacity is not None:
        tokens = sampling.prompt_tokens + sampling.new_tokens
        request = _with_gpus(base, inference_gpus(reward, plan.request.gpus_per_node, capacity, tokens))
    seconds = _score_seconds(gpu, sampling, sampling.prompts)
    basis = "a forward pass of each answer" if seconds else "no published speed"
    return request, seconds, basis


def _score_seconds(gpu: Gpu | None, sampling: Sampling, prompts: int | None) -> Range | None:
    if sampling.reward_model is None or prompts is None:
        return None
    tokens = sampling.prompt_tokens + sampling.new_tokens
    return forward_seconds(sampling.reward_model, gpu, prompts * sampling.answers, tokens)


def _hours(plan: Plan, seconds: Range | None) -> Range | None:
    if seconds is None:
        return None
    start = plan.prediction.start_up.hours if plan.prediction.start_up is not None and seconds[1] else 0.0
    return seconds[0] / 3600 + start, seconds[1] / 3600 + start


def _usd(plan: Plan, request: Request, nodes: int, hours: Range | None) -> Range | None:
    """Return the price of the complete instances used; None for another instance type."""
    plan_usd_per_hour, machine = plan.prediction.usd_per_hour, plan.request.instance_type
    if plan_usd_per_hour is None or hours is None or machine is None or request.instance_type != machine:
        return None
    try:
        machine_gpus = hardware.instance(machine).gpu_count
    except UserError:
        machine_gpus = plan.request.gpus_per_node
    together = max(machine_gpus // request.gpus_per_node, 1) if request.gpus_per_node else 1
    rate = plan_usd_per_hour / plan.request.nodes * -(-nodes // together)
    return rate * hours[0], rate * hours[1]


def _sum(ranges: Sequence[Range | None]) -> Range | None:
    known_ranges = [item for item in ranges if item is not None]
    if len(known_ranges) < len(ranges):
        return None
    return sum(low for low, _ in known_ranges), sum(high for _, high in known_ranges)
