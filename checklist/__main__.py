"""``python -m checklist`` (two local nodes), or the same under torchrun or srun (one process for each rank).

Exit status: 0 pass or warn, 1 fail, 2 could not run, 3 no verdict.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from checklist.measurements import PHASES
from checklist.options import Options, names
from checklist.rendezvous import Rendezvous, from_environment
from estimator.errors import UserError

if TYPE_CHECKING:
    from checklist.result import Result

COULD_NOT_RUN = 2
_COLOURS = {"PASS": "green", "WARN": "yellow", "FAIL": "bold red", "NO-VERDICT": "magenta"}

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def checklist(
    nodes: Annotated[
        int | None, typer.Option(help="Nodes that there should be. [default: the launcher's, else 2 local]")
    ] = None,
    gpus_per_node: Annotated[
        int | None, typer.Option(help="Ranks of each node. [default: all its GPUs; 1 on CPUs]")
    ] = None,
    profile: Annotated[str, typer.Option(help="quick, standard or deep.")] = "quick",
    only: Annotated[list[str] | None, typer.Option(help="Checks to do, with commas.")] = None,
    skip: Annotated[list[str] | None, typer.Option(help="Checks to leave out, with commas.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    timeout: Annotated[
        float | None, typer.Option(help="Seconds for each phase. [default: the profile's]")
    ] = None,
    op_timeout: Annotated[
        float | None, typer.Option(help="Seconds after which one operation counts as hung.")
    ] = None,
    thresholds: Annotated[
        Path | None, typer.Option(help="Your own table of thresholds, above the shipped one.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="What the thresholds call this system.")] = None,
    json: Annotated[Path | None, typer.Option(help="Where to write the result.")] = None,
    keep: Annotated[Path | None, typer.Option(help="Folder in which logs and journals are kept.")] = None,
) -> None:
    """Is this cluster fit to train on, and if not, which node, link, direction or GPU is at fault?"""
    try:
        place = from_environment()
        options = Options(
            profile=profile,  # type: ignore[arg-type]
            nodes=nodes if nodes is not None else place.nodes if place else 2,
            gpus_per_node=gpus_per_node,
            device=device,  # type: ignore[arg-type]
            only=names(only or ()),
            skip=names(skip or ()),
            time_limits_s=dict.fromkeys(PHASES, timeout) if timeout is not None else {},
            op_limit_s=op_timeout,
            thresholds=thresholds,
            system=system,
        )
        result = _measured(options, place, json, keep)
    except UserError as error:
        print(error, file=sys.stderr)
        raise typer.Exit(COULD_NOT_RUN) from None
    if place is None or place.leads:
        show(result)
    raise typer.Exit(result.exit_code)


def _measured(options: Options, place: Rendezvous | None, json: Path | None, keep: Path | None) -> Result:
    """Run and judge; what can be wrong with the user's files is found before the run."""
    from checklist.result import write
    from checklist.thresholds import table
    from checklist.verdict import judge

    limits = table(options.thresholds)
    if json is not None and not os.access(json.absolute().parent, os.W_OK):
        raise UserError(f"{json} can't be written.", "Give --json a file in a folder that exists.")
    if place is None:
        from checklist.local import run_local

        measured = run_local(options, directory=keep)
    else:
        from checklist.supervisor import run

        measured = run(_with_gpus(options, place), place, directory=keep)
    result = judge(measured, checks=options.checks, thresholds=limits, system=options.system)
    if json is not None and (place is None or place.leads):
        write(result, json)
    return result


def _with_gpus(options: Options, place: Rendezvous) -> Options:
    """What each node was asked for: the option, else what the launcher has started."""
    started = max(1, place.world // place.nodes)
    return options if options.gpus_per_node is not None else replace(options, gpus_per_node=started)


def show(result: Result) -> None:
    """The verdict as a table, and what to do."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    lines = Table("Check", "Verdict", "Why", box=None, pad_edge=False)
    for check in result.checks:
        lines.add_row(check.check, Text(check.verdict, style=_COLOURS[check.verdict]), Text(check.reason))
    console.print(lines)
    for finding in result.findings:
        console.print()
        console.print(Text(f"{finding.verdict}: {finding.title}", style=_COLOURS[finding.verdict]))
        for line in finding.advice:
            console.print(Text(f"  {line}"))
        if finding.command:
            console.print(Text(f"  $ {finding.command}"))
    for phase in result.measurements.phases:
        if phase.status != "done" and phase.reason != "not asked for":
            console.print(Text(f"Phase {phase.name} {phase.status}: {phase.reason}."))
    for note in result.notes:
        console.print(Text(f"Note: {note}"))
    console.print()
    seconds = result.measurements.seconds
    console.print(
        Text(f"{result.verdict}: {result.headline} ({seconds:.0f} s)", style=_COLOURS[result.verdict])
    )


if __name__ == "__main__":
    app()
