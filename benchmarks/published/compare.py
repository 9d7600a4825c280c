"""Score the estimator on a table of measurements: ``python -m benchmarks.published.compare TABLE``."""

from __future__ import annotations

import csv
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from benchmarks.published import scoring
from benchmarks.published.held_out import compare_held_out
from benchmarks.published.scoring import GROUPS, SPEED_GROUPS, Comparison, Score, Scored, grouped, line, score
from benchmarks.published.verdict import verdict
from estimator.errors import USER_ERROR_STATUS, UserError

WORST = 10  # rows shown

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.command()
def compare(
    measured: Annotated[
        Path,
        typer.Argument(
            metavar="TABLE", help="CSV with the columns of benchmarks/published/data/measured.csv."
        ),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    each_row: Annotated[bool, typer.Option("--rows", help="Include the prediction of each row.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print the prediction of each row as CSV.")] = False,
    by: Annotated[
        str,
        typer.Option(
            help="Group rows by source, framework, method, quality, kind, quality_kind or lengths_kind."
        ),
    ] = "quality_kind",
    held_out: Annotated[
        bool, typer.Option("--held-out", help="Score each source with ranges fitted to the other sources.")
    ] = False,
) -> None:
    """Score the estimator against a table of published measurements."""
    if by not in scoring.GROUPS:
        raise UserError(f"--by {by} is not known.", f"Choose one of {', '.join(scoring.GROUPS)}.")
    comparison = compare_held_out(measured) if held_out else scoring.compare(measured)
    if as_json:
        typer.echo(json.dumps(scoring.as_json(comparison, each_row=each_row), indent=1))
    elif as_csv:
        _print_csv(comparison)
    else:
        _print_tables(comparison, by, tables=each_row)


def _print_csv(comparison: Comparison) -> None:
    lines = [line("memory", item) for item in comparison.memory]
    lines += [line("throughput", item) for item in comparison.throughput]
    names = list(lines[0]) if lines else ["id"]
    writer = csv.DictWriter(sys.stdout, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)


def _print_tables(comparison: Comparison, by: str, *, tables: bool) -> None:
    console = Console()
    console.print(_verdict(comparison))
    console.print(
        f"{len(comparison.rows)} rows: memory of {len(comparison.memory)} and throughput of "
        f"{len(comparison.throughput)} scored; {len(comparison.skipped)} scored in neither."
    )
    for title, items in (("Memory", comparison.memory), ("Throughput", comparison.throughput)):
        if items:
            console.print(_scores(title, items, by))
            console.print(_worst(title, items, None if tables else WORST))
    if comparison.skipped:
        console.print(_skips(comparison))


def _verdict(comparison: Comparison) -> str:
    """Summarize how often the estimator misjudged whether a run fits, and list those runs."""
    counts = verdict(comparison.judged)
    lines = [
        f"Of {counts.ran} runs that ran, {counts.refused_of_ran} are called impossible"
        + (f" ({counts.refused_of_ran / counts.ran:.1%})" if counts.ran else "")
        + f"; of {counts.oom} that ran out of memory, {counts.accepted_of_oom} are said to fit."
    ]
    lines += [
        f"  {item.row.id} {item.row.source}: "
        + ("ran out of memory" if item.row.oom else "ran")
        + f", needs {item.needs_gib:.1f} GiB of {item.capacity_gib:.1f} by the estimate"
        for item in comparison.judged
        if item.wrong
    ]
    return "\n".join(lines)


def _scores(title: str, items: tuple[Scored, ...], by: str) -> Table:
    if title == "Throughput" and by not in SPEED_GROUPS:
        by = "quality"
    table = Table(title=title, caption="median and 95th percentile of |predicted / measured - 1|")
    table.add_column(by.replace("_", ", "), no_wrap=True)
    for name in ("rows", "median", "95th", "bias", "under", "covered"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, value in {"all": score(items), **grouped(items, GROUPS[by])}.items():
        table.add_row(name, *_cells(value))
    return table


def _cells(score: Score) -> list[str]:
    numbers = (score.median_abs_error, score.p95_abs_error, score.bias)
    shares = (score.under_by_3pct, score.covered)
    return [
        str(score.rows),
        *("-" if value is None else f"{value:.1%}" for value in numbers),
        *("-" if value is None else f"{value:.0%}" for value in shares),
    ]


def _worst(title: str, items: tuple[Scored, ...], count: int | None) -> Table:
    unit = "GiB" if title == "Memory" else "tokens/s of one GPU"
    which = "each row" if count is None else "furthest off"
    table = Table(title=f"{title}: {which} ({unit})", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name, width in (("row", 6), ("source", 21), ("method", 8), ("kind", 9)):
        table.add_column(name, no_wrap=True, width=width)
    for name, width in (("measured", 9), ("predicted", 9), ("error", 8)):
        table.add_column(name, justify="right", no_wrap=True, width=width)
    for item in sorted(items, key=lambda item: -abs(item.error))[:count]:
        row = item.row
        kind = (row.kind or "") if title == "Memory" else ""
        values = (f"{item.measured:.1f}", f"{item.predicted:.1f}", f"{item.error:+.1%}")
        table.add_row(row.id, row.source, row.method, kind, *values)
    return table


def _skips(comparison: Comparison) -> Table:
    table = Table(title="Scored in neither")
    table.add_column("rows", justify="right")
    table.add_column("reason", overflow="fold")
    for reason, count in Counter(comparison.skipped.values()).most_common():
        table.add_row(str(count), reason)
    return table


def main() -> None:
    """Run the command; a user's mistake is two lines on standard error and exit status 2."""
    try:
        app(prog_name="python -m benchmarks.published.compare")
    except UserError as error:
        print(error, file=sys.stderr)
        raise SystemExit(USER_ERROR_STATUS) from None


if __name__ == "__main__":
    main()
