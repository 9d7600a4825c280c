"""The errors that are shown to people: what is wrong, and what to do about it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from estimator.plan import Plan


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


class CannotFit(UserError):  # noqa: N818 - it is an answer, with a plan in it, more than an error
    """Nothing that is at hand can run the job.

    Attributes
    ----------
    wanted:
        The best plan on any machine of the catalogue, or None.
    suggestions:
        Command-line options that would work, best first.
    here:
        What there is, in words.
    """

    def __init__(
        self,
        problem: str,
        advice: str = "",
        *,
        wanted: Plan | None = None,
        suggestions: tuple[str, ...] = (),
        here: str = "",
    ) -> None:
        super().__init__(problem, advice)
        self.wanted, self.suggestions, self.here = wanted, suggestions, here

    def __reduce__(self) -> tuple[object, ...]:  # type: ignore[override]
        state = {"wanted": self.wanted, "suggestions": self.suggestions, "here": self.here}
        return type(self), (self.problem, self.advice), state
