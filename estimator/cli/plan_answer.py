"""Verbose output of ``finetune plan``: a table of all plans, and the best plan in full."""

from __future__ import annotations

import textwrap
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from estimator.cli import output
from estimator.plan import GIB
from estimator.planning.ranking import Ranking, compare_prices, compare_speeds
from estimator.planning.report import render
from estimator.planning.rows import row_of

if TYPE_CHECKING:
    from rich.table import Table


def show(ranking: Ranking) -> None:
    """Print the ranking criteria, a table of all plans, and the best plan in full."""
    console = output.console()
    for line in filter(None, (ranking.obstacle, f"Order: {ranking.order}")):
        console.print(textwrap.fill(line, console.width), markup=False)
    console.print(_table(ranking))
    if ranking.faster:
        console.print(f"{textwrap.fill(ranking.faster, console.width)}\n", markup=False)
    best = replace(ranking.best, rejected=tuple(str(line) for line in ranking.rejected))
    console.print(render(best, console.width, hints=True), markup=False)


def _table(ranking: Ranking) -> Table:
    from rich import box
    from rich.table import Table

    timed = ranking.best.prediction.tokens is not None
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("", justify="right")
    table.add_column("plan", overflow="fold")
    for name in (
        "GiB\nper GPU",
        "tokens/s",
        "hours" if timed else "USD/h",
        "USD" if timed else "USD/M\ntokens",
    ):
        table.add_column(name, justify="right")
    rows = [row_of(*item) for item in enumerate(ranking.plans, 1)]
    for row in rows:
        table.add_row(*_cells(row, rows[0], timed=timed))
    return table


def _cells(row: dict[str, Any], first: dict[str, Any], *, timed: bool) -> list[str]:
    nodes = f"{row['nodes']} " if row["nodes"] > 1 else ""
    machine = f", {nodes}{row['instance_type']} ({row['cloud']})" if row["instance_type"] else ""
    layout = f"{row['method']}, {row['layout']}, batch {row['micro_batch_size']} x {row['accumulation']}"
    gpus = f"{row['nodes'] * row['gpus_per_node']}x {row['gpu_type']}" if row["gpu_type"] else "CPUs"
    lines = [
        f"{gpus}{machine}",
        layout + (", checkpointing" if row["activation_checkpointing"] else ""),
        _against(row, first, timed=timed),
        f"low availability: {row['low_availability']}" if row["low_availability"] else "",
    ]
    cost = ("hours", "usd") if timed else ("usd_per_hour", "usd_per_million_tokens")
    return [
        str(row["rank"]),
        "\n".join(line for line in lines if line),
        _memory_cell(row),
        "?" if row["tokens_per_second"] is None else f"{row['tokens_per_second']:,.0f}",
        *(_figure(row[name]) for name in cost),
    ]


def _memory_cell(row: dict[str, Any]) -> str:
    """Format needed memory, capacity and verdict of one plan."""
    if row["capacity_bytes"] is None:
        return f"{row['needs_bytes'] / GIB:.0f}"
    needs, capacity = row["needs_bytes"] / GIB, row["capacity_bytes"] / GIB
    share = 100 * row["headroom_bytes"] / row["capacity_bytes"]
    return f"{needs:.0f} of {capacity:.0f}\n{row['verdict']}, {share:.0f} %"


def _figure(value: float | None) -> str:
    """Format with two decimals, or two significant digits for small values."""
    if value is None:
        return "?"
    return f"{value:,.2f}" if value >= 0.1 or value == 0 else f"{value:.2g}"


def _against(row: dict[str, Any], first: dict[str, Any], *, timed: bool) -> str:
    """Compare price and speed of a plan with those of the first one, if they are known.

    ``timed``: price and time of the complete job, as in the columns.
    """
    if row is first:
        return ""
    price, time = ("usd", "hours") if timed else ("usd_per_million_tokens", "tokens_per_second")
    parts = []
    if row[price] is not None and first[price] is not None:
        parts.append(compare_prices(row[price] / first[price]))
    if row[time] is not None and first[time] is not None:
        parts.append(compare_speeds(first[time] / row[time] if timed else row[time] / first[time]))
    missing = {"price": row["usd_per_hour"], "speed": row["tokens_per_second"]}
    return ", ".join([*parts, *(f"{name} unknown" for name, value in missing.items() if value is None)])
