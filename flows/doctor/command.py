"""finetune doctor: check what works on this machine, and show how to fix the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from flows.doctor.line import Line
    from flows.doctor.probes import Probe

DEFAULT_JOB = "local"  # the line that says whether it can run
RUN = "finetune run"
_MARKS = {"ok": ("ok", "green"), "unknown": ("?", "yellow"), "no": ("no", "red")}


def doctor(
    time_limit: Annotated[
        float | None, typer.Option(min=1, help="Time limit of each probe in seconds. [default: 20 to 120]")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check packages, GPUs, engines, datastore, backends and tokens; print each finding with its fix.

    Exit status 0: the default job can run on this machine; 1: it cannot. Values of tokens are never shown.
    """
    from dataclasses import asdict

    from estimator.cli.output import console, print_json
    from flows.doctor.probes import PROBES
    from flows.doctor.processes import run_probes

    terminal = console()
    found: dict[Probe, list[Line]] = {}
    for probe, lines in run_probes(PROBES, time_limit):
        found[probe] = lines
        if not as_json:
            terminal.print(_table(probe.section, lines))
            terminal.file.flush()
    obstacles = obstacles_of([line for lines in found.values() for line in lines])
    if as_json:
        rows = [{"section": probe.section, **asdict(line)} for probe in PROBES for line in found[probe]]
        for row in rows:
            del row["needs"]
        print_json({"default_job": not obstacles, "lines": rows})
    else:
        terminal.print(_verdict(obstacles), markup=False)
    raise typer.Exit(1 if obstacles else 0)


def obstacles_of(lines: list[Line]) -> list[Line]:
    """Return the lines that prevent the default job from running on this machine, or leave it unknown."""
    job = [line for line in lines if line.check == DEFAULT_JOB]
    names = {name for line in job for name in line.needs}
    return [line for line in lines if line.state != "ok" and (line in job or line.check in names)]


def _verdict(obstacles: list[Line]) -> str:
    if not obstacles:
        return f"The default job can run here: {RUN}"
    return f"The default job cannot run here: {', '.join(line.check for line in obstacles)} (see above)."


def _table(section: str, lines: list[Line]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(width=4, justify="right")
    table.add_column(width=9)
    table.add_column(width=17)
    table.add_column(overflow="fold")
    for line in lines:
        mark, style = _MARKS[line.state]
        text = Text(line.found)
        if line.fix and line.state != "ok":
            text.append(f"\nfix: {line.fix}", style="dim")
        table.add_row(Text(mark, style=style), Text(section), Text(line.check), text)
    return table
