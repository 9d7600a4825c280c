"""A plan on one screen: job, hardware, price, time, memory, three reasons and two alternatives."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Sequence

from estimator.errors import CannotFit, UserError
from estimator.formatting import MIB, format_bytes, format_duration, format_parameters, format_usd
from estimator.plan import Plan, Request
from estimator.planning.report import (
    LABEL,
    describe_batch,
    describe_gpus,
    describe_hours,
    describe_layout,
    describe_speed,
    describe_total,
)
from estimator.planning.rows import usd_per_million_tokens
from estimator.suggestions import apply_suggestion
from estimator.vocabulary import TASKS

WIDTH = 80
REASONS = 3
ALTERNATIVES = 2
MORE = "--verbose shows memory by category, all reasons and all alternatives."
_LINES = 4  # of a reason


def render_summary(plan: Plan, alternatives: Sequence[Plan] = ()) -> str:
    """Format a plan in at most 30 lines of 80 columns.

    ``alternatives``: the next best plans, best first. Without them, rejected machines that fit are named.
    """
    task = "" if plan.task == "sft" else f" {plan.task}"
    size = format_parameters(plan.parameters)
    lines = [f"Plan: {plan.model}, {plan.method}{task} with {plan.engine} ({size})"]
    lines += _row("Where", _where(plan))
    lines += _row("Price", _price(plan))
    lines += _row("Time", _time(plan))
    lines += _row("Memory", f"{plan.prediction.memory.describe()} per {_device(plan)}")
    lines += _row("Step", _step(plan))
    if plan.prepare is not None and plan.evaluate is not None:
        steps = {"prepare": plan.prepare, "evaluate": plan.evaluate}
        if TASKS[plan.task].images:
            steps = {"prepare": plan.prepare, "encode": plan.request, "evaluate": plan.evaluate}
        lines += _row(
            "Other steps", ", ".join(f"{name} ({_size(request)})" for name, request in steps.items())
        )
    if plan.planned_only is not None:
        lines += _row("Limits", f"planning only, no command runs this: {plan.planned_only}")
    reasons = [line for line in plan.why if not line.startswith(("price:", "precision"))]
    lines += _list("Why", reasons[:REASONS])
    if plan.overrides:
        lines += _list(
            "Overridden",
            [f"{item.name}: {item.used} instead of {item.planned}" for item in plan.overrides][:REASONS],
        )
    items = [_alternative(alternative) for alternative in alternatives]
    fitting = [line.replace(": fits, ", ": ") for line in plan.rejected if ": fits" in line]
    items = items or sorted(fitting, key=lambda line: "low availability" in line)
    lines += _list("Also fits", items[:ALTERNATIVES])
    return "\n".join(lines)


def render_cannot_fit(error: CannotFit, command: str) -> str:
    """Format what does not fit, the available hardware, a plan that would fit, and commands that would work.

    ``command``: the command line of the user; each suggestion is that command with its changes.
    """
    lines = textwrap.wrap(error.problem, WIDTH)
    if error.available:
        lines += _row("Available", error.available)
    if error.example_plan is not None:
        lines += ["", "A plan that fits:", render_summary(error.example_plan)]
    if error.suggestions:
        try:
            arguments = shlex.split(command)
        except ValueError as unreadable:
            raise UserError(f"Cannot parse the command {command!r}: {unreadable}.") from None
        lines += ["", "Alternatives that fit:"]
        offered = (shlex.join(apply_suggestion(arguments, suggestion)) for suggestion in error.suggestions)
        lines += [f"  {line}" for line in dict.fromkeys(offered)]
    return "\n".join(lines)


def _device(plan: Plan) -> str:
    return "GPU" if plan.layout.device == "cuda" else "process"


def _where(plan: Plan) -> str:
    request = plan.request
    size = f"{_size(request)} per node"
    if plan.target == "local":
        return f"this machine: {_size(request)}"
    kind = " spot" if request.spot else ""
    machine = f"{request.nodes}x{kind} {request.instance_type or 'node'}"
    cloud = f" ({request.cloud})" if request.cloud else ""
    return f"{machine}{cloud}: {size}"


def _size(request: Request) -> str:
    parts = [f"{request.gpus_per_node}x {request.gpu_type}"] if request.gpus_per_node else []
    return ", ".join([*parts, f"{request.cpu} CPU", format_bytes(request.memory_mib * MIB)])


def _price(plan: Plan) -> str:
    prediction = plan.prediction
    if prediction.usd_per_hour is None:
        unpriced = {"local": "none: this machine", "allocation": "unknown: the nodes of this job"}
        return unpriced.get(plan.target, "unknown: no price for these machines")
    text = f"{format_usd(prediction.usd_per_hour)} per hour"
    per_million = usd_per_million_tokens(plan)
    if per_million is not None:
        text += f", {format_usd(per_million)} per million tokens"
    if prediction.usd is not None:
        text = f"{describe_total(prediction.usd, prediction.usd_range, format_usd)}: {text}"
    return f"{text}{'' if not prediction.price_source else f' ({prediction.price_source})'}"


def _time(plan: Plan) -> str:
    prediction = plan.prediction
    text = describe_speed(prediction)
    if prediction.tokens_per_second is None:
        return text
    if prediction.hours is not None:
        text = f"{describe_hours(prediction)}: {text}"
    if prediction.start_up is not None:
        text += f", {format_duration(prediction.start_up.hours * 3600)} to start"
    return text


def _step(plan: Plan) -> str:
    layout = plan.layout
    processes = "1 process" if layout.world_size == 1 else f"{layout.world_size} processes"
    options = ", ".join([layout.precision, *plan.accelerations])
    return (
        f"{processes}, {describe_layout(layout)}; {describe_batch(layout)} of {plan.length}; "
        f"activation checkpointing {layout.checkpointing}; {options}"
    )


def _alternative(plan: Plan) -> str:
    prediction = plan.prediction
    facts = [f"{describe_gpus(plan.request)}, {plan.method}"]
    if prediction.tokens_per_second is not None:
        facts.append(f"{prediction.tokens_per_second:,.0f} tokens/s")
    else:
        facts.append("speed unknown")
    if prediction.usd_per_hour is not None:
        facts.append(f"{format_usd(prediction.usd_per_hour)} per hour")
    per_million = usd_per_million_tokens(plan)
    if per_million is not None:
        facts.append(f"{format_usd(per_million)} per million tokens")
    return ", ".join(facts)


def _row(label: str, text: str) -> list[str]:
    first, *continuation = textwrap.wrap(text, WIDTH - LABEL) or [""]
    return [f"{label:<{LABEL}}{first}".rstrip(), *(f"{'':{LABEL}}{line}" for line in continuation)]


def _list(label: str, items: Sequence[str]) -> list[str]:
    lines: list[str] = []
    for item in items:
        wrapped = textwrap.wrap(item, WIDTH - LABEL - 2, max_lines=_LINES, placeholder=" ...")
        lines += [f"{'' if lines else label:<{LABEL}}- {wrapped[0]}"]
        lines += [f"{'':{LABEL}}  {line}" for line in wrapped[1:]]
    return lines
