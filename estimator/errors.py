"""The errors that are shown to people: what is wrong, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from estimator.changes import (
    FINETUNE,
    Change,
    Spelling,
    Suggestion,
    Text,
    in_words,
    suggestion_in_words,
)
from estimator.formatting import printable

if TYPE_CHECKING:
    from estimator.plan import Plan


MISTAKE = 2
"""Exit status of a command that a UserError ends before anything is begun; click's for wrong options."""


class UserError(Exception):
    """A mistake of the user's, or a state of the machine that the user can mend.

    Shown as two lines and never with a traceback.

    Parameters
    ----------
    problem:
        One line: what is wrong with whose value.
    advice:
        One line (or a few): what to do. Options stand in both as :class:`Change`, so that the front door
        that was used names them as it takes them (:func:`spelled_as`); until then as ``finetune`` does.
    """

    def __init__(self, problem: Text, advice: Text = "") -> None:
        super().__init__(problem, advice)
        self._texts: tuple[Text, Text] = (problem, advice)
        self.problem, self.advice = (printable(in_words(text, FINETUNE)) for text in self._texts)

    def __str__(self) -> str:
        return f"{self.problem}\n{self.advice}" if self.advice else self.problem

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), self._texts, {"problem": self.problem, "advice": self.advice}

    def spell(self, spelling: Spelling) -> None:
        """Name options as this front door does."""
        self.problem, self.advice = (printable(in_words(text, spelling)) for text in self._texts)


@contextmanager
def spelled_as(spelling: Spelling) -> Iterator[None]:
    """UserErrors that leave this block name options as this front door takes them."""
    try:
        yield
    except UserError as error:
        error.spell(spelling)
        raise


class CannotFit(UserError):  # noqa: N818 - it is an answer, with a plan in it, more than an error
    """Nothing that is available can run the job.

    Attributes
    ----------
    example_plan:
        The best plan on any machine of the catalogue, or None.
    suggestions:
        Changes of options that would work, best first.
    here:
        What there is, in words.
    """

    def __init__(
        self,
        problem: Text,
        advice: Text = "",
        *,
        example_plan: Plan | None = None,
        suggestions: tuple[Suggestion, ...] = (),
        here: str = "",
    ) -> None:
        super().__init__(problem, advice)
        self.example_plan, self.suggestions, self.here = example_plan, suggestions, here
        self.spell(FINETUNE)

    def spell(self, spelling: Spelling) -> None:
        """Name options as this front door does; the advice begins with what would work."""
        super().spell(spelling)
        if self.suggestions:
            lines = [suggestion_in_words(suggestion, spelling) for suggestion in self.suggestions]
            self.advice = f"It would run with {', or '.join(lines)}. {self.advice}".strip()

    def __reduce__(self) -> tuple[object, ...]:
        kind, texts, state = super().__reduce__()
        names = ("example_plan", "suggestions", "here")
        more = {name: getattr(self, name) for name in names}
        return kind, texts, {**state, **more}  # type: ignore[dict-item]


__all__ = ["MISTAKE", "CannotFit", "Change", "UserError", "spelled_as"]
