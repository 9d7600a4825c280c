"""A Plan as plain text: request, layout, prediction and reasons."""

from __future__ import annotations

import textwrap
from collections.abc import Callable

from estimator.formatting import (
    MIB,
    format_bytes,
    format_count,
    format_duration,
    format_parameters,
    format_usd,
)
from estimator.option_checks import check_type
from estimator.plan import Layout, LearningRate, Plan, Prediction, Request
from estimator.setup import Setup
from estimator.vocabulary import SHARDINGS, TASKS

LABEL = 12  # width of the left column
BAR = 24  # width of the longest memory bar


def render(plan: Plan, width: int = 100, *, hints: bool = False) -> str:
    """Format the complete plan in at most ``width`` columns, without color codes.

    ``hints``: with hints for values that the plan does not set.
    """
    check_type("plan", plan, Plan, "Give a result of plan(), or ranking.best of plans().")
    method = plan.method if plan.task == "sft" else f"{plan.method} {plan.task}"
    lines = [f"Plan: {plan.model}, {method} with {plan.engine} ({format_parameters(plan.parameters)})"]
    lines += _row("Where", _where(plan), width)
    lines += _row("Request", _request(plan), width)
    if plan.prepare is not None and plan.evaluate is not None:
        lines += _row("Other steps", _steps(plan, plan.prepare, plan.evaluate), width)
    lines += _row("Layout", _layout(plan), width)
    lines += _memory(plan, width)
    lines += _row("Speed", _speed(plan), width)
    lines += _row("Price", _price(plan), width)
    lines += _list("Why", plan.why, width)
    lines += _list("Rejected", plan.rejected, width)
    overrides = tuple(
        f"{item.name}: {item.used} instead of {item.planned} ({item.given_by})" for item in plan.overrides
    )
    lines += _list("Overridden", overrides, width)
    if hints:
        lines += _list("Hints", _rates(plan.learning_rates), width)
    return "\n".join(lines)


def _where(plan: Plan) -> str:
    request = plan.request
    if plan.target == "local":
        place = "this machine"
    else:
        names = {
            "allocation": "the nodes of this job",
            "kubernetes": "Kubernetes",
            "batch": "AWS Batch",
            "catalogue": "the catalogue" if request.instance_type else "your own hardware",
        }
        place = names[plan.target]
    if request.instance_type:
        place += f", {request.nodes}x {request.instance_type}"
        place += f" ({request.cloud})" if request.cloud else ""
    return place


def _request(plan: Plan) -> str:
    request = plan.request
    nodes = format_count(request.nodes, "spot node" if request.spot else "node")
    labels = "".join(f", labeled {name}={value}" for name, value in request.node_labels)
    return (
        f"{nodes}{', each' * (request.nodes > 1)}: {request.gpus}, {request.cpu} CPU, "
        f"{format_bytes(request.memory_mib * MIB)} memory, "
        f"{format_bytes(request.shared_memory_mib * MIB)} shared memory, "
        f"{format_bytes(request.disk_mib * MIB)} disk{labels}"
    )


def _steps(plan: Plan, prepare: Request, evaluate: Request) -> str:
    """Format the requests of the other steps; images are encoded on one of the training nodes."""
    texts, steps = [], [("prepare", prepare), ("evaluate", evaluate)]
    if TASKS[plan.task].images:
        steps.insert(1, ("encode", plan.request))
    for name, request in steps:
        memory, disk = format_bytes(request.memory_mib * MIB), format_bytes(request.disk_mib * MIB)
        texts.append(f"{name} ({request.gpus}, {request.cpu} CPU, {memory} memory, {disk} disk)")
    return ", ".join(texts)


def _layout(plan: Plan) -> str:
    layout = plan.layout
    options = [layout.precision, layout.optimizer, *plan.accelerations]
    if layout.offload != "none":
        options.append(f"optimizer offloaded to the {layout.offload.upper()}")
    if layout.optimizer_in_backward:
        options.append("optimizer in the backward pass")
    return (
        f"{format_count(layout.world_size, 'process')} on {layout.device}, {describe_layout(layout)}; "
        f"{describe_batch(layout)} of {plan.length}; activation checkpointing {layout.checkpointing}; "
        + ", ".join(options)
    )


def describe_batch(layout: Layout | Setup) -> str:
    """Format the global batch and its factors: "batch 64 (micro batch 2 x 8 accumulated x 4 processes)"."""
    batch = layout.micro_batch_size * layout.accumulation * layout.data_parallel
    factors = [f"micro batch {layout.micro_batch_size}"]
    if layout.accumulation > 1:
        factors.append(f"{layout.accumulation} accumulated")
    if layout.data_parallel > 1:
        kind = "processes" if layout.data_parallel == layout.world_size else "replicas"
        factors.append(f"{layout.data_parallel} {kind}")
    return f"batch {batch} ({' x '.join(factors)})"


def describe_gpus(request: Request) -> str:
    """Format the number and type of all GPUs, and the machines if known: "16x L4 on 2 g6.48xlarge (aws)"."""
    count = f"{request.nodes} " if request.nodes > 1 else ""
    machine = f" on {count}{request.instance_type} ({request.cloud})" if request.instance_type else ""
    return f"{request.nodes * request.gpus_per_node}x {request.gpu_type}{machine}"


def describe_layout(layout: Layout) -> str:
    """Format the distribution of the job: "FSDP, TP 8, PP 4 (1f1b)"."""
    parts = [_sharding(layout.sharding)]
    if layout.replicate > 1:
        parts[0] = f"HYBRID_SHARD, {layout.replicate} copies"
    if layout.tensor_parallel > 1:
        parts.append(f"TP {layout.tensor_parallel}")
    if layout.context_parallel > 1:
        parts.append(f"CP {layout.context_parallel}")
    if layout.pipeline_parallel > 1:
        stages = f" x {layout.virtual_stages}" if layout.virtual_stages > 1 else ""
        parts.append(f"PP {layout.pipeline_parallel}{stages} ({layout.schedule})")
    if layout.expert_parallel > 1:
        parts.append(f"EP {layout.expert_parallel}")
    return ", ".join(parts)


def _sharding(name: str) -> str:
    return SHARDINGS[name].title


def _memory(plan: Plan, width: int) -> list[str]:
    memory, on_gpu = plan.prediction.memory, plan.layout.device == "cuda"
    text = f"{memory.describe()} per {'GPU' if on_gpu else 'process'}"
    if on_gpu:
        text += f"; host {format_bytes(memory.host_bytes)} per node"
    lines = _row("Memory", text, width)
    largest = max((value for _, value in memory.categories), default=0)
    for name, value in memory.categories:
        bar = "#" * round(min(BAR, max(width - LABEL - 34, 0)) * value / largest) if largest else ""
        lines.append(f"{'':{LABEL}}{name:<22}{format_bytes(value):>10}  {bar}".rstrip())
    needs = f"needs {format_bytes(memory.needs_bytes)}, at most {format_bytes(memory.needs_range[1])}"
    counter = "nvidia-smi" if on_gpu else "resident memory"
    shown = f"{format_bytes(memory.shows_bytes)}, at most {format_bytes(memory.shows_range[1])}"
    return [
        *lines,
        *_row("", f"{needs}; range: {memory.needs_basis}", width),
        *_row("", f"{counter} will show {shown}; range: {memory.shows_basis}", width),
    ]


def describe_speed(prediction: Prediction) -> str:
    """Format tokens/s with their range, or the reason why they are unknown."""
    if prediction.tokens_per_second is None:
        return f"unknown: {prediction.throughput_basis or 'no measurements'}"
    text = f"{prediction.tokens_per_second:,.0f} tokens/s"
    if prediction.tokens_per_second_range is not None:
        low, high = prediction.tokens_per_second_range
        text += f" ({low:,.0f} to {high:,.0f})"
    return text


def describe_hours(prediction: Prediction) -> str:
    """Format the hours of the complete job with their range; "unknown" without a speed."""
    return describe_total(
        prediction.hours, prediction.hours_range, lambda hours: format_duration((hours or 0.0) * 3600)
    )


def describe_total(
    value: float | None, bounds: tuple[float, float] | None, text_of: Callable[[float | None], str]
) -> str:
    """Format a total of the complete job, and its range if known: "5.3 h (2.9 h to 7.7 h)"."""
    if value is None:
        return "unknown"
    return text_of(value) + (f" ({text_of(bounds[0])} to {text_of(bounds[1])})" if bounds else "")


def _speed(plan: Plan) -> str:
    prediction = plan.prediction
    text = describe_speed(prediction)
    if prediction.tokens_per_second is None:
        return text
    if prediction.hours is not None:
        text += f", {describe_hours(prediction)}"
        parts = _parts_of_time(prediction)
        text += f", of which {', '.join(parts)}" if parts else ""
    elif prediction.start_up is not None:
        text += f", {format_duration(prediction.start_up.hours * 3600)} to start"
    if prediction.mfu is not None:
        text += f", MFU {prediction.mfu:.0%}"
    return f"{text}; {prediction.throughput_basis}"


def _parts_of_time(prediction: Prediction) -> list[str]:
    """List the hours of the job that are not training: start-up, evaluations, work lost to interruptions."""
    parts = []
    if (start := prediction.start_up) is not None:
        minutes = {
            "machine": start.machine_minutes,
            "image": start.image_minutes,
            "weights": start.weights_minutes,
        }
        breakdown = (f"{name} {format_duration(m * 60)}" for name, m in minutes.items() if m >= 0.5)
        parts.append(f"{format_duration(start.hours * 3600)} start-up ({', '.join(breakdown)})")
    if prediction.evaluation_hours:
        parts.append(f"{format_duration(prediction.evaluation_hours * 3600)} evaluations")
    lost_hours = prediction.interruptions.lost_hours if prediction.interruptions is not None else None
    if lost_hours is not None:
        parts.append(f"{format_duration(lost_hours * 3600)} lost to interruptions")
    return parts


def _price(plan: Plan) -> str:
    prediction = plan.prediction
    if prediction.usd_per_hour is None:
        unpriced = {"local": "none on this machine", "allocation": "unknown: nodes of this job"}
        return unpriced.get(plan.target, "unknown: no price in the table")
    text = f"{format_usd(prediction.usd_per_hour)} per hour"
    if prediction.usd is not None:
        text += f", {describe_total(prediction.usd, prediction.usd_range, format_usd)}"
    if prediction.price_source:
        text += f" ({prediction.price_source})"
    return text


def _rates(hints: tuple[LearningRate, ...]) -> tuple[str, ...]:
    if not hints:
        return ()
    names = {"sqrt": "square-root"}
    lines = [
        f"learning rate {hint.value:.2g} by the {names.get(hint.rule, hint.rule)} rule ({hint.source})"
        for hint in hints
    ]
    return (*lines, f"both are scaled from {hints[0].run}; a starting point for a search")


def _row(label: str, text: str, width: int) -> list[str]:
    wrapped = textwrap.wrap(text, max(width - LABEL, 20)) or [""]
    return [f"{label:<{LABEL}}{wrapped[0]}".rstrip()] + [f"{'':{LABEL}}{line}" for line in wrapped[1:]]


def _list(label: str, items: tuple[str, ...], width: int) -> list[str]:
    lines: list[str] = []
    for item in items:
        wrapped = textwrap.wrap(item, max(width - LABEL - 2, 20))
        lines += [f"{'' if lines else label:<{LABEL}}- {wrapped[0]}"]
        lines += [f"{'':{LABEL}}  {line}" for line in wrapped[1:]]
    return lines
