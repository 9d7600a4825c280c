"""finetune rightsize: requested against used resources of flows' steps, and the next request."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from estimator.rightsizing.report import StepReport
    from estimator.rightsizing.usage import Sizes

_UNKNOWN = "-"


def rightsize(
    flow: Annotated[
        str | None, typer.Argument(metavar="[FLOW]", help="Name of a flow [default: all flows]")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object for each step.")] = False,
) -> None:
    """Compare requested and used resources of the steps of your flows, and recommend the next request.

    Reads the records that steps with @gpu_profile have left in the datastore: by Metaflow's configuration, or
    in the folder where the runs were started. Prices are on demand, for the share of a machine that is used.
    """
    from decorators import usage
    from estimator.cli.output import console, print_json
    from estimator.errors import UserError
    from estimator.names import did_you_mean
    from estimator.rightsizing.report import report_step

    storage = usage.configured_usage_storage()
    recorded = usage.steps_with_records(storage)
    selected = [names for names in recorded if flow in (None, names[0])]
    if not selected:
        flows = sorted({name for name, _ in recorded})
        problem = (
            f"No step of {flow} has a record of its usage." if flow else "No flow has a record of its usage."
        )
        raise UserError(
            problem,
            did_you_mean(flow or "", flows)
            or "Run it with --with gpu_profile first, and call this in the same folder or configuration.",
        )
    reports = []
    for name, step in selected:
        history = usage.with_killed(usage.read_history(storage, name, step), time.time())
        if history:
            reports.append(report_step(history))
    if as_json:
        print_json([report.to_dict() for report in reports])
        return
    if not reports:
        raise UserError(
            "No recorded task has ended yet.",
            "Try again when a step has succeeded, or has run out of memory.",
        )
    output = console()
    output.print(_table(reports))
    lines = [(f"{report.flow}.{report.step}", report.resources) for report in reports if report.resources]
    if lines:
        output.print("Write above @step, or run with --with gpu_profile:rightsize=true:\n")
        width = max(len(name) for name, _ in lines)
        for name, text in lines:
            output.print(f"{name:<{width}}  {text}", markup=False)


def _table(reports: list[StepReport]) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from estimator.formatting import format_usd

    table = Table(box=SIMPLE_HEAD)
    table.add_column("step", style="bold", overflow="fold")
    for name in ("tasks", "out of\nmemory"):
        table.add_column(name, justify="right")
    for name in ("requested", "used (95 %)", "next request"):
        table.add_column(name, overflow="fold")
    table.add_column("wasted", justify="right", no_wrap=True)
    for report in reports:
        share, usd = report.wasted_share, report.wasted_usd
        wasted = _UNKNOWN if share is None or usd is None else f"{format_usd(usd)}\n{share:.0%}"
        table.add_row(
            f"{report.flow}.{report.step}",
            str(report.tasks),
            str(report.out_of_memory),
            _text(report.requested),
            _text(report.used),
            _text(report.next_request),
            wasted,
        )
    return table


def _text(sizes: Sizes | None) -> str:
    return _UNKNOWN if sizes is None else sizes.describe().replace("nothing", _UNKNOWN)
