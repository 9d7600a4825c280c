"""Errors that are shown to users without a traceback: what is wrong, and what to do about it."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from estimator.formatting import printable
from estimator.suggestions import Suggestion, format_suggestion

USER_ERROR_STATUS = 2
"""Exit status of a command that ends with a UserError before it starts to work; click's for wrong options."""


class UserError(Exception):
    """A mistake by the user, or a state of the machine that the user can correct.

    Parameters
    ----------
    problem:
        One line: what is wrong with whose value. Options are named as on the command line.
    advice:
        One line (or a few): what to do.
    """

    def __init__(self, problem: str, advice: str = "") -> None:
        super().__init__(problem, advice)
        self.problem, self.advice = printable(problem), printable(advice)

    def __str__(self) -> str:
        return f"{self.problem}\n{self.advice}" if self.advice else self.problem


class CannotFit(UserError):  # noqa: N818 - it is a result with a plan in it, more than an error
    """None of the available hardware can run the job.

    Attributes
    ----------
    example_plan:
        The best plan (estimator.plan.Plan) on any instance type of the catalogue, or None.
    suggestions:
        Changes of options with which the job fits, best first.
    available:
        Description of the available hardware.
    shortage:
        Memory needed and available, as a clause; "" if something else is short.
    """

    def __init__(
        self,
        problem: str,
        advice: str = "",
        *,
        example_plan: Any = None,  # estimator.plan imports this module
        suggestions: tuple[Suggestion, ...] = (),
        available: str = "",
    ) -> None:
        super().__init__(problem, advice)
        suggestions = tuple(each for n, each in enumerate(suggestions) if each not in suggestions[:n])
        self.example_plan, self.suggestions, self.available = example_plan, suggestions, available
        self.shortage = ""
        if suggestions:
            options = ", or ".join(format_suggestion(suggestion) for suggestion in suggestions)
            self.advice = f"It would run with {options}. {advice}".strip()


@contextmanager
def impossible_paths_refused() -> Iterator[None]:
    """Raise UserError for a path that the system cannot resolve: a name too long, a loop of links.

    ``Path.exists`` and ``Path.is_file`` raise OSError for them.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENAMETOOLONG, errno.ELOOP):
            raise
        path = str(error.filename)
        shown = path if len(path) <= 80 else f"{path[:60]}..."
        raise UserError(f"{shown}: {os.strerror(error.errno)}.", "Use another path.") from None
