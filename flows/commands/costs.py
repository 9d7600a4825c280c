"""finetune costs: what runs of the flows have cost, by user, team or model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from estimator.costs import Total

FLOWS = ("FinetuneFlow", "FinetuneLinearFlow", "RejectionFlow")
ALL = "all"


def costs(
    by: Annotated[str, typer.Option(help="Group the costs by user, team or model.")] = "user",
    since: Annotated[
        str, typer.Option(help="Only runs started since then: 30d, 12h, 2w, or a date.")
    ] = "30d",
    flow: Annotated[
        list[str] | None, typer.Option(help="Name of a flow; repeatable [default: all flows of this package]")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object for each row.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print the rows as CSV.")] = False,
) -> None:
    """Show the cost of runs: hours of GPU nodes, including failed attempts, at the prices of their plans.

    Reads the runs from Metaflow's configured datastore, or from the folder where they were started.
    """
    from datetime import datetime, timezone

    from estimator.cli.output import console, one_format, print_csv, print_json
    from estimator.costs import BY, add_up, parse_since, total
    from estimator.errors import UserError

    one_format(json=as_json, csv=as_csv)
    column = next((name for name in BY if name == by), None)
    if column is None:
        raise UserError(f"--by {by} is not known.", f"Choose one of {', '.join(BY)}.")
    started = parse_since(since, datetime.now(timezone.utc))
    from flows.commands.past_runs import read_costs

    report = read_costs(flow or FLOWS, started)
    rows = [*add_up(report, column), total(ALL, report)]
    if as_json:
        print_json([row.to_dict() for row in rows])
    elif as_csv:
        print_csv([_named(row, column) for row in rows])
    else:
        console().print(_table(rows, column))


def _named(row: Total, by: str) -> dict[str, Any]:
    values = row.to_dict()
    return {by: values.pop("name"), **values}


def _table(rows: list[Total], by: str) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from estimator.formatting import format_usd

    table = Table(box=SIMPLE_HEAD)
    table.add_column(by, style="bold", overflow="fold")
    for name in (
        "runs",
        "node hours",
        "of failed\nattempts",
        "USD",
        "hours without\na price",
        "attempts\nwithout an end",
    ):
        table.add_column(name, justify="right")
    for row in rows:
        if row.name == ALL:
            table.add_section()
        table.add_row(
            row.name,
            str(row.runs),
            f"{row.hours:,.2f}",
            f"{row.failed_hours:,.2f}",
            format_usd(row.usd),
            f"{row.unpriced_hours:,.2f}",
            str(row.unfinished),
        )
    return table
