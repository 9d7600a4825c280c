"""Output of the result on the terminal."""

from __future__ import annotations

from checklist.measurements import NOT_REQUESTED
from checklist.outputs import figures
from checklist.result import Result, Verdict
from estimator import terminal

COLORS: dict[Verdict, str] = {"PASS": "green", "WARN": "yellow", "FAIL": "bold red", "NO-VERDICT": "magenta"}
MAX_RANKS = 16  # GPUs of two machines; with more ranks only ranges are shown


def show(result: Result) -> None:
    """Format verdicts with figures, advice for each finding, and the next commands."""
    from rich.table import Table
    from rich.text import Text

    console = terminal.console()
    lines = Table("Check", "Verdict", "Why", "Measured", box=None, pad_edge=False)
    for check in result.checks:
        verdict = Text(check.verdict, style=COLORS[check.verdict])
        lines.add_row(check.check, verdict, Text(check.reason), Text(figures.of_check(check)))
    console.print(lines)
    headers, rows = figures.by_rank(result)
    if rows and len(rows) <= MAX_RANKS:
        ranks = Table(box=None, pad_edge=False)
        for header in headers:
            ranks.add_column(header, overflow="fold")  # no name is cut
        for row in rows:
            ranks.add_row(*map(Text, row))
        console.print()
        console.print(ranks)
    for finding in result.findings:
        console.print()
        console.print(Text(f"{finding.verdict}: {finding.title}", style=COLORS[finding.verdict]))
        for line in finding.advice:
            console.print(Text(f"  {line}"))
        if finding.command:
            console.print(Text(f"  $ {finding.command}"), soft_wrap=True)
    for phase in result.measurements.phases:
        if phase.status != "done" and phase.reason != NOT_REQUESTED:
            console.print(Text(f"Phase {phase.name} {phase.status}: {phase.reason}."))
    for note in result.notes:
        console.print(Text(f"Note: {note}"))
    console.print()
    seconds = result.measurements.seconds
    console.print(
        Text(f"{result.verdict}: {result.headline} ({seconds:.0f} s)", style=COLORS[result.verdict])
    )
    if result.next_commands:
        console.print(
            Text("To check the network, run one of these on two nodes (by torchrun on both, or as a flow):")
        )
        for command in result.next_commands:
            console.print(Text(f"  $ {command}"), soft_wrap=True)
