"""The one error that is shown to people: what is wrong, and what to do about it."""

from __future__ import annotations


class UserError(Exception):
    """A mistake of the user's, or a state of the machine that the user can mend.

    Shown as two lines and never with a traceback.

    Parameters
    ----------
    problem:
        One line: what is wrong with whose value.
    advice:
        One line (or a few): what to do.
    """

    def __init__(self, problem: str, advice: str = "") -> None:
        super().__init__(f"{problem}\n{advice}" if advice else problem)
        self.problem = problem
        self.advice = advice

    def __reduce__(self) -> tuple[type[UserError], tuple[str, str]]:
        return type(self), (self.problem, self.advice)
