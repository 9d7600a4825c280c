"""Findings of a preflight: a table for the terminal, and one error if the run can never start."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Literal

from estimator import terminal
from estimator.errors import UserError
from estimator.terminal import print

State = Literal["ok", "unknown", "no"]
_STYLE = {"ok": "green", "unknown": "yellow", "no": "bold red"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One row of a preflight: the check, its state, details, and the command that fixes a problem."""

    check: str
    state: State
    detail: str
    fix: str = ""  # a command, if one exists


@dataclass(kw_only=True, slots=True)
class Findings:
    """The rows of one preflight. ``where`` names the cluster or queue."""

    where: str
    rows: list[Finding] = field(default_factory=list)

    def ok(self, check: str, detail: str) -> None:
        self.rows.append(Finding(check=check, state="ok", detail=detail))

    def unknown(self, check: str, detail: str, fix: str = "") -> None:
        self.rows.append(Finding(check=check, state="unknown", detail=detail, fix=fix))

    def no(self, check: str, detail: str, fix: str = "") -> None:
        self.rows.append(Finding(check=check, state="no", detail=detail, fix=fix))

    @property
    def impossible(self) -> list[Finding]:
        return [row for row in self.rows if row.state == "no"]

    def state(self, check: str) -> State | None:
        """Return the worst state among the rows of a check; None if it has no rows."""
        states = [row.state for row in self.rows if row.check == check]
        return max(states, key=("ok", "unknown", "no").index) if states else None

    def show(self) -> None:
        """Print the table to standard error; standard output may hold a deployment's JSON."""
        from rich.box import SIMPLE
        from rich.table import Table
        from rich.text import Text

        table = Table(title=f"Can {self.where} run this?", title_justify="left", box=SIMPLE)
        for name in ("check", "state", "details", "what to do"):
            table.add_column(name, overflow="fold")
        for row in self.rows:
            mark = {"ok": "ok", "unknown": "?", "no": "NO"}[row.state]
            table.add_row(row.check, Text(mark, style=_STYLE[row.state]), Text(row.detail), Text(row.fix))
        terminal.console(file=sys.stderr, width=None if sys.stderr.isatty() else 160).print(table)

    def report_and_check(self) -> None:
        """Print the table, and raise UserError if a row shows that the run can never start."""
        if any(row.state != "ok" for row in self.rows):
            self.show()
        else:
            print(f"{self.where} can run this.", file=sys.stderr)
        if problems := self.impossible:
            raise UserError(
                f"{self.where} cannot run this: "
                + "; ".join(f"{row.check}: {row.detail}" for row in problems)
                + ".",
                problems[0].fix or "See the table. --no-preflight submits the run anyway.",
            )
