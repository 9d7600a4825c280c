"""Content of a step's card, as plain blocks made from a CardState; decorators.card.writer writes them.

First screen: job and hardware, status, predicted and measured values. Below: curves, the plan with its
reasons, ranks. Unknown values are shown as "unknown".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from decorators.card import charts
from decorators.card.blocks import UNKNOWN, Block, Chart, Grid, Log, Text, safe, size
from decorators.card.memory import memory_bars, memory_over_time, memory_rows
from decorators.card.resources import idle_lines, resource_rows, utilization_over_time
from decorators.card.state import CardState, Setting
from estimator.formatting import format_clock
from estimator.plan import Plan, Request
from estimator.vocabulary import TASKS
from launchers.report.evaluations import best_of
from launchers.report.metrics import dist_lines

LOG_TITLE = "End of the log"
MAX_RANKS = 64  # maximum rows of the rank table


def draw(state: CardState) -> list[Block]:
    """Return the blocks of a step's card, from top to bottom."""
    blocks: list[Block] = [Text(markdown=f"## {title(state)}\n\n{status(state)}")]
    if state.run.warnings:
        warnings = "\n".join(f"- {safe(line)}" for line in state.run.warnings)
        blocks.append(Text(markdown=f"**Warnings**\n\n{warnings}"))
    if state.run.straggler_lines:
        late_ranks = "\n".join(f"- {safe(line)}" for line in state.run.straggler_lines)
        blocks.append(Text(markdown=f"**Late ranks**\n\n{late_ranks}"))
    idle = idle_lines(state)
    if idle:
        blocks.append(Text(markdown="**Idle GPUs**\n\n" + "\n".join(f"- {safe(line)}" for line in idle)))
    if state.exported:
        blocks.append(
            Text(markdown="\n".join(f"- {safe(f'{name}: {value}')}" for name, value in state.exported))
        )
    # Imported where they are needed: most steps have no evaluation, and their cards shall cost little
    if state.evaluation is not None or state.task_metrics is not None or state.run.evaluation_images:
        from decorators.card import evaluation
    if state.evaluation is not None:
        blocks += evaluation.evaluation_blocks(state.evaluation)
    if state.task_metrics is not None:
        blocks += evaluation.task_blocks(state.task_metrics)
    if state.plan is not None:
        blocks.append(Chart(spec=memory_bars(state)))
        blocks.append(Grid(headers=("", "predicted", "measured"), rows=tuple(comparison(state))))
    else:
        measured_rows = [(label, measured) for label, _, measured in comparison(state) if measured != UNKNOWN]
        blocks.append(Grid(headers=("", "measured"), rows=tuple(measured_rows)))
    resources = resource_rows(state)
    if resources:
        blocks += [Text(markdown="### Requested and used"), *_resources(state, resources)]
    if state.trials:
        from decorators.card.trial import trial_rows

        blocks += [
            Text(markdown="### Trials before the run"),
            Grid(headers=("plan", "predicted", "measured"), rows=trial_rows(state.trials, state.plan)),
        ]
    notes = (
        state.measured.notes
        if state.plan or state.about
        else ("Nothing was predicted for this step.", *state.measured.notes)
    )
    if notes:
        blocks.append(Text(markdown="\n".join(f"- {safe(note)}" for note in notes)))
    if state.run.steps:
        blocks += [Chart(spec=curve) for curve in _curves(state)]
    if state.run.evaluation_images:
        blocks += evaluation.drawn_blocks(state.run.evaluation_images)
    if state.run.windows:
        from decorators.card.window import window_blocks

        for window in state.run.windows:
            blocks += window_blocks(window, state.plan)
    over_time = memory_over_time(state)
    if over_time is not None:
        blocks.append(Chart(spec=over_time))
    utilization = utilization_over_time(state)
    if utilization is not None:
        blocks.append(Chart(spec=utilization))
    if state.plan is not None:
        blocks += _plan(state.plan)
    if state.measured.ranks:
        blocks += _ranks(state)
    blocks += [Text(markdown="### Measurements"), Grid(headers=("", ""), rows=node_rows(state))]
    if state.settings:
        blocks += _settings(state.settings)
    if state.log_tail:
        blocks += [Text(markdown=f"### {LOG_TITLE}"), Log(text=state.log_tail)]
    return blocks


def title(state: CardState) -> str:
    """Format model, method, engine and hardware."""
    measured = state.measured
    if state.plan is None and state.about is not None:
        return safe(f"{state.about.model} · {state.about.method} · {state.about.engine} · {measured.step}")
    if state.plan is None:
        name = measured.device_names[0] if measured.device_names else "no GPU"
        return (
            f"Step {measured.step} on {measured.host} ({len(measured.gpus)} x {name})"
            if measured.gpus
            else (f"Step {measured.step} on {measured.host} ({name})")
        )
    plan = state.plan
    text = f"{plan.model} · {plan.method} · {plan.engine} · {hardware(plan)}"
    if plan.layout.nodes > 1:
        text += f" · node {measured.node}" + ("" if measured.node == 0 else " (node 0 has the main card)")
    return safe(text)


def hardware(plan: Plan) -> str:
    """Format the hardware: "2 nodes x 8 A100-80GB" or "1 node x 2 CPU processes"."""
    layout, request = plan.layout, plan.request
    nodes = f"{layout.nodes} node{'s' if layout.nodes > 1 else ''}"
    if layout.device == "cuda":
        return f"{nodes} x {layout.processes_per_node} {request.gpu_type or 'GPU'}"
    return f"{nodes} x {layout.processes_per_node} CPU process{'es' if layout.processes_per_node > 1 else ''}"


def status(state: CardState) -> str:
    """Format one line: the progress of the step, or how it ended."""
    run, done = state.run, state.measured.steps
    progress = f"step {done}" + (f" of {run.total_steps}" if run.total_steps else "") if done else ""
    newest = run.steps[-1].loss if run.steps else None
    loss = "" if newest is None else f"loss {newest:.4f}"
    duration = format_clock(state.measured.duration_seconds)
    if state.failed is not None:
        first = next(iter(state.failed.strip().splitlines()), "")
        return _join(f"**Failed** after {duration}", progress, loss) + f"\n\n> {safe(first[:300])}"
    if state.ended is not None:
        return _join(f"**Finished** in {duration}", progress, loss)
    phase, remaining_s = run.phase, run.eta_seconds
    phase = "" if phase == "train" else phase
    eta = f"ETA {format_clock(remaining_s)}" if remaining_s is not None else ""
    if state.plan is not None:
        eta = eta or "ETA unknown"
    return _join(f"**Running** for {duration}", phase, progress, loss, eta)


def comparison(state: CardState) -> list[tuple[str, str, str]]:
    """Rows of (quantity, predicted, measured) as text."""
    measured, plan = state.measured, state.plan
    suffix = "" if state.ended else " so far"
    prediction = plan.prediction if plan else None
    memory = prediction.memory if prediction else None
    on_gpu = plan.layout.device == "cuda" if plan else bool(measured.gpus)
    rows = memory_rows(memory, measured, on_gpu=on_gpu)
    rows += [
        (
            "host memory of a node",
            size(memory.host_bytes) if memory else UNKNOWN,
            size(measured.host_peak_bytes),
        ),
        (
            "latent positions/s" if state.plan and TASKS[state.plan.task].images else "tokens/s",
            count(prediction.tokens_per_second) if prediction else UNKNOWN,
            count(measured.tokens_per_second),
        ),
    ]
    if measured.mfu is not None:
        rows.append(("MFU", "", f"{measured.mfu:.1%}"))
    best = best_of(state.run.evaluations)
    if best is not None:
        evaluations = len(state.run.evaluations)
        times = f"{evaluations} evaluation{'s' if evaluations > 1 else ''}"
        rows.append(("lowest held-out loss", "", f"{best.loss:.4f} after step {best.step}, of {times}"))
    rows += [
        (
            "time",
            format_clock(prediction.hours * 3600) if prediction and prediction.hours is not None else UNKNOWN,
            format_clock(measured.duration_seconds) + suffix,
        ),
        (
            "USD",
            f"{prediction.usd:,.2f}" if prediction and prediction.usd is not None else UNKNOWN,
            f"{measured.usd:,.2f}{suffix}" if measured.usd is not None else UNKNOWN,
        ),
    ]
    return [row for row in rows if row[1:] != (UNKNOWN, UNKNOWN)]


def plan_rows(plan: Plan) -> tuple[tuple[str, str], ...]:
    """Rows of the plan's choices as text."""
    layout, request = plan.layout, plan.request
    return (
        ("request per node", request_text(request)),
        (
            "layout",
            f"{layout.world_size} process{'es' if layout.world_size > 1 else ''}, "
            + ("not sharded" if layout.sharding == "none" else layout.sharding)
            + (f", tensor parallel {layout.tensor_parallel}" if layout.tensor_parallel > 1 else "")
            + (f", offload to {layout.offload}" if layout.offload != "none" else ""),
        ),
        (
            "batch",
            f"{layout.global_batch_size} sequences = {layout.micro_batch_size} micro batch x "
            f"{layout.accumulation} accumulation x {layout.data_parallel} data parallel; "
            f"sequence length {layout.seq_len:,}",
        ),
        (
            "step",
            f"{layout.precision}, {layout.optimizer}, activation checkpointing {layout.checkpointing}",
        ),
        ("memory estimate", plan.prediction.memory.shows_basis),
        ("speed estimate", plan.prediction.throughput_basis or UNKNOWN),
    )


def request_text(request: Request) -> str:
    """Format the resource request of one node."""
    parts = [
        request.gpus,
        f"{request.cpu} CPU core{'s' if request.cpu > 1 else ''}",
        f"{size(request.memory_mib * 2**20)} memory",
        f"{size(request.shared_memory_mib * 2**20)} shared memory",
        f"{size(request.disk_mib * 2**20)} disk",
    ]
    if request.instance_type:
        parts.append(request.instance_type + (f" ({request.cloud})" if request.cloud else ""))
    return ", ".join(parts)


def rank_rows(state: CardState) -> tuple[tuple[str, ...], ...]:
    """One row of text per rank."""
    phases = state.run.phases
    return tuple(
        (
            str(rank.rank),
            rank.host or UNKNOWN,
            rank.device or UNKNOWN,
            phases.get(rank.rank, ""),
            count(rank.tokens_per_second),
            "no GPU"
            if rank.reserved_peak_bytes is None and rank.rss_peak_bytes is not None
            else size(rank.reserved_peak_bytes),
            size(rank.rss_peak_bytes),
        )
        for rank in state.measured.ranks[:MAX_RANKS]
    )


def node_rows(state: CardState) -> tuple[tuple[str, str], ...]:
    """Rows of this node's samples."""
    m = state.measured
    rows = [
        (
            f"GPU {gpu.index}: {gpu.name}",
            f"{size(gpu.peak_used_bytes)} of {size(gpu.total_bytes)} peak "
            f"({size(gpu.start_used_bytes)} before the step), "
            f"{_percent(gpu.mean_utilization)} busy, {_watts(gpu.peak_power_watts)}",
        )
        for gpu in m.gpus
    ]
    cores = f"{m.mean_cpu_cores:.1f} cores on average" if m.mean_cpu_cores is not None else UNKNOWN
    rows += [
        ("host memory of the step's processes", f"{size(m.host_peak_bytes)} of {size(m.host_total_bytes)}"),
        ("CPU of the step's processes", cores),
        ("peak shared memory (/dev/shm)", size(m.shared_memory_peak_bytes)),
        ("minimum free disk", size(m.disk_free_min_bytes)),
        ("profiler overhead", f"{m.samples:,} samples, {m.sampling_share:.2%} of the step's time"),
    ]
    return tuple(rows)


def count(value: float | None) -> str:
    """Format a count of any magnitude, or "unknown"."""
    return UNKNOWN if value is None else f"{value:,.0f}"


def _speed_curve(state: CardState) -> dict[str, Any]:
    plan, steps = state.plan, state.run.steps
    speeds, title = [(s.step, s.tokens_per_second or None) for s in steps], "tokens/s"
    if plan is not None and TASKS[plan.task].images:
        batch, title = plan.layout.global_batch_size, "images/s"
        speeds = [(s.step, batch / s.dt) for s in steps if s.dt > 0]
    return charts.line(speeds, title, from_zero=True, smooth=True)


def _curves(state: CardState) -> list[dict[str, Any]]:
    steps, held_out = state.run.steps, state.run.evaluations
    best = best_of(held_out)
    best_step = None if best is None else best.step
    losses = [(result.step, result.loss) for result in held_out if math.isfinite(result.loss)]
    views = [
        charts.line_with_held_out([(s.step, s.loss) for s in steps], losses, "loss", best_step, smooth=True),
        _speed_curve(state),
        charts.step_times([(s.step, s.dtf, s.dtb, s.dt) for s in steps]),
    ]
    if any(s.lr is not None for s in steps):
        rates = [(s.step, s.lr) for s in steps]
        views.insert(1, charts.line(rates, "learning rate", from_zero=True, number_format=".1e"))
    for name in dict.fromkeys(name for step in steps for name in step.task):
        points = [(s.step, s.task.get(name)) for s in steps]
        held_out_metric = [
            (result.step, result.metrics[name]) for result in held_out if name in result.metrics
        ]
        views.append(charts.line_with_held_out(points, held_out_metric, name.replace("_", " "), best_step))
    if any(s.mfu is not None for s in steps):
        views.append(charts.line([(s.step, s.mfu) for s in steps], "MFU", from_zero=True, number_format="%"))
    if any(s.grad_norm is not None for s in steps):
        views.append(charts.line([(s.step, s.grad_norm) for s in steps], "gradient norm", from_zero=True))
    return views


def _plan(plan: Plan) -> list[Block]:
    blocks: list[Block] = [Text(markdown="### The plan"), Grid(headers=("", ""), rows=plan_rows(plan))]
    if plan.overrides:
        rows = tuple((o.name, o.planned, o.used, o.given_by) for o in plan.overrides)
        blocks.append(Text(markdown="**Values that differ from the plan**"))
        blocks.append(Grid(headers=("name", "planned", "used", "set by"), rows=rows))
    for heading, entries in (("Why", plan.why), ("Alternatives", plan.rejected)):
        if entries:
            items = "\n".join(f"- {safe(text)}" for text in entries)
            blocks.append(Text(markdown=f"**{heading}**\n\n{items}"))
    return blocks


def _resources(state: CardState, rows: list[tuple[str, str, str, str]]) -> list[Block]:
    """Return the table of requested and used resources; with the next request if no plan decides it."""
    if state.next_request is None:
        cells = tuple(row[:3] for row in rows)
        return [Grid(headers=("per node", "requested", "used"), rows=cells)]
    tasks = state.next_request.tasks
    basis = (
        f"the {tasks} task{'s' * (tasks > 1)} that succeeded so far" if tasks else state.next_request.reason
    )
    basis = f"The next request is what rightsize=True would choose: {basis}."
    headers = ("per node", "requested", "used", "next request")
    return [Grid(headers=headers, rows=tuple(rows)), Text(markdown=safe(basis))]


def _settings(settings: Sequence[Setting]) -> list[Block]:
    """List all hyperparameters, starting with those that differ from the defaults."""
    blocks: list[Block] = []
    changed = [setting for setting in settings if setting.value != setting.default]
    if changed:
        rows = tuple((setting.name, setting.value, setting.default) for setting in changed)
        blocks += [
            Text(markdown="### Settings of this run"),
            Grid(headers=("", "used", "default"), rows=rows),
        ]
    defaults = ", ".join(
        f"{safe(setting.name)} {safe(setting.value)}" for setting in settings if setting not in changed
    )
    if defaults:
        blocks.append(Text(markdown=f"**Defaults:** {defaults}"))
    return blocks


def _ranks(state: CardState) -> list[Block]:
    headers = ("rank", "host", "device", "at", "tokens/s", "GPU memory peak", "host memory peak")
    blocks: list[Block] = [Text(markdown="### Ranks of this node")]
    if state.run.infos:
        blocks.append(Text(markdown=safe(dist_lines(state.run.infos)[0])))
    blocks.append(Grid(headers=headers, rows=rank_rows(state)))
    if len(state.measured.ranks) > MAX_RANKS:
        blocks.append(Text(markdown=f"and {len(state.measured.ranks) - MAX_RANKS} more"))
    return blocks


def _percent(share: float | None) -> str:
    return UNKNOWN if share is None else f"{share:.0%}"


def _watts(watts: float | None) -> str:
    return "power unknown" if watts is None else f"{watts:,.0f} W"


def _join(*parts: str) -> str:
    return " · ".join(part for part in parts if part)
