"""The result for the person at the terminal."""

from __future__ import annotations

from checklist.result import Result, Verdict

COLOURS: dict[Verdict, str] = {"PASS": "green", "WARN": "yellow", "FAIL": "bold red", "NO-VERDICT": "magenta"}


def show(result: Result) -> None:
    """The verdict as a table, and what to do."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    lines = Table("Check", "Verdict", "Why", box=None, pad_edge=False)
    for check in result.checks:
        lines.add_row(check.check, Text(check.verdict, style=COLOURS[check.verdict]), Text(check.reason))
    console.print(lines)
    for finding in result.findings:
        console.print()
        console.print(Text(f"{finding.verdict}: {finding.title}", style=COLOURS[finding.verdict]))
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
        Text(f"{result.verdict}: {result.headline} ({seconds:.0f} s)", style=COLOURS[result.verdict])
    )
