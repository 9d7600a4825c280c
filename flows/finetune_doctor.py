"""finetune doctor: what is installed, what would work here, and what mends the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from flows.doctor.line import Line

DEFAULT_JOB = "local"  # the line that says whether it can run
RUN = "finetune run"
_MARKS = {"ok": ("ok", "green"), "unknown": ("?", "yellow"), "no": ("no", "red")}


def doctor(
    time_limit: Annotated[
        float | None, typer.Option(min=1, help="Most seconds for each probe. [default: 20 to 120]")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """What is installed, which engines and backends would work here, and why not: a line each, with its fix.

    Ends with status 0 where the default job can run on this machine, with 1 where it can't. Of tokens it says
    whether they are set, and nothing else.
    """
    from dataclasses import asdict

    from estimator.cli.output import console, print_json
    from flows.doctor.probes import PROBES
    from flows.doctor.processes import look

    found = look(PROBES, time_limit)
    obstacles = obstacles_of([line for _, lines in found for line in lines])
    if as_json:
        rows = [{"section": probe.section, **asdict(line)} for probe, lines in found for line in lines]
        for row in rows:
            del row["needs"]
        print_json({"default_job": not obstacles, "lines": rows})
    else:
        out = console()
        for section in dict.fromkeys(probe.section for probe, _ in found):
            out.print(f"[bold]{section}[/bold]")
            out.print(_table([line for probe, lines in found if probe.section == section for line in lines]))
        out.print(_verdict(obstacles), markup=False)
    raise typer.Exit(1 if obstacles else 0)


def obstacles_of(lines: list[Line]) -> list[Line]:
    """The lines because of which the default job can't run on this machine, or isn't known to."""
    job = [line for line in lines if line.check == DEFAULT_JOB]
    needed = {name for line in job for name in line.needs}
    return [line for line in lines if line.state != "ok" and (line in job or line.check in needed)]


def _verdict(obstacles: list[Line]) -> str:
    if not obstacles:
        return f"The default job can run here: {RUN}"
    return f"The default job can't run here: {', '.join(line.check for line in obstacles)} (see above)."


def _table(lines: list[Line]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(width=4, justify="right")
    table.add_column(width=17)
    table.add_column(overflow="fold")
    for line in lines:
        mark, style = _MARKS[line.state]
        text = Text(line.found)
        if line.fix and line.state != "ok":
            text.append(f"\nfix: {line.fix}", style="dim")
        table.add_row(Text(mark, style=style), Text(line.check), text)
    return table
