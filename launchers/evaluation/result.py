"""Result of the evaluation of the base and the finished model: losses, scores and answers."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from estimator.formatting import printable
from estimator.vocabulary import TASKS
from launchers.evaluation.held_out import CalibrationBin, Score
from launchers.evaluation.image_evaluation import Pictures

EXAMPLES = 3  # number of answers in logs and on cards
EXACT_MATCH = "held-out answers right"


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """Greedy answers of both models to one held-out prompt."""

    prompt: str  # rendered text, special tokens included
    reference: str
    base: str
    finetuned: str
    question: str = ""  # the last turn of the prompt; empty for plain text
    images: tuple[str, ...] = ()  # encoded images of the prompt, in base64

    @property
    def base_is_right(self) -> bool:
        """Whether the base model's answer equals the reference, ignoring surrounding white space."""
        return self.base.strip() == self.reference.strip()

    @property
    def finetuned_is_right(self) -> bool:
        """Whether the finished model's answer equals the reference, ignoring surrounding white space."""
        return self.finetuned.strip() == self.reference.strip()


@dataclass(frozen=True, kw_only=True, slots=True)
class ExactMatch:
    """Counts of held-out answers that equal the reference."""

    answers: int
    base: int
    finetuned: int

    def text(self) -> str:
        """Format both counts for logs, cards and model pages."""
        return f"{self.base:,} of {self.answers:,} before, {self.finetuned:,} of {self.answers:,} after"


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationResult:
    """Scores of the base and the finished model; None if no rows were held out."""

    task: str = "sft"
    base: Score | None
    finetuned: Score | None
    answers: tuple[Answer, ...] = ()
    calibration: tuple[CalibrationBin, ...] = ()  # finished reward models only
    pictures: tuple[Pictures, ...] = ()  # image models only
    device: str = ""
    precision: str = ""
    schema: int = field(default=1)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> EvaluationResult:
        scores = {
            name: None if values[name] is None else Score(**values[name]) for name in ("base", "finetuned")
        }
        answers = tuple(
            Answer(**(answer | {"images": tuple(answer.get("images", ()))})) for answer in values["answers"]
        )
        bins = tuple(CalibrationBin(**item) for item in values.get("calibration", ()))
        pictures = tuple(Pictures(**item) for item in values.get("pictures", ()))
        return cls(**(values | scores | {"answers": answers, "calibration": bins, "pictures": pictures}))

    @property
    def exact_match(self) -> ExactMatch | None:
        """Counts of right answers; None for tasks other than sft, and if no prompt was answered."""
        if self.task != "sft" or not self.answers:
            return None
        return ExactMatch(
            answers=len(self.answers),
            base=sum(answer.base_is_right for answer in self.answers),
            finetuned=sum(answer.finetuned_is_right for answer in self.answers),
        )

    @property
    def examples(self) -> tuple[Answer, ...]:
        """First answers; if all of them are right, the last one is replaced by the first wrong answer."""
        first, remaining = self.answers[:EXAMPLES], self.answers[EXAMPLES:]
        if self.exact_match is None or not all(answer.finetuned_is_right for answer in first):
            return first
        wrong_answer = next((answer for answer in remaining if not answer.finetuned_is_right), None)
        return first if wrong_answer is None else (*first[:-1], wrong_answer)

    def table(self) -> str:
        """Format the example answers for a terminal; empty if there are none."""
        lines: list[str] = []
        for answer in self.examples:
            right = self.exact_match is not None and answer.finetuned_is_right
            is_wrong = self.exact_match is not None and not answer.finetuned_is_right
            lines += [
                f"message   {_shorten(answer.question or answer.prompt)}",
                f"expected  {_shorten(answer.reference)}",
                f"before    {_shorten(answer.base, 80)}",
                f"after     {_shorten(answer.finetuned)}{'  (right)' * right}{'  (wrong)' * is_wrong}",
            ]
        return "\n".join(lines)

    def text(self) -> str:
        """Format the scores of both models for a terminal."""
        task, base, finetuned = TASKS[self.task], self.base, self.finetuned
        if base is None or finetuned is None:
            lines = ["held-out loss: nothing was held out"]
        elif task.preferences:
            unit, right = ("answers", "judged right") if task.judged else ("pairs", "ranked right")
            accuracies = f"{base.metrics['accuracy']:.1%} -> {finetuned.metrics['accuracy']:.1%}"
            lines = [
                f"held-out {unit}: loss {base.loss:.4f} before, {finetuned.loss:.4f} after;"
                f" {right} {accuracies} ({base.rows:,} {unit})"
            ]
        elif task.draws_answers:
            lines = [
                f"held-out prompts: mean reward {base.metrics['reward']:.4f} before,"
                f" {finetuned.metrics['reward']:.4f} after"
                f" ({base.rows:,} prompts, one sampled answer each)"
            ]
        elif task.images:
            lines = [
                f"held-out images: loss {base.loss:.4f} before, {finetuned.loss:.4f} after"
                f" ({base.rows:,} images, each at four noise levels)"
            ]
        else:
            lines = [
                f"held-out loss: {base.loss:.4f} before, {finetuned.loss:.4f} after"
                f" (perplexity {base.perplexity:,.4g} -> {finetuned.perplexity:,.4g};"
                f" {base.rows:,} rows, {base.labels:,} tokens)"
            ]
        if self.exact_match is not None:
            lines.append(f"{EXACT_MATCH}: {self.exact_match.text()}")
        return "\n".join(lines)


def _shorten(text: str, limit: int = 160) -> str:
    flat = printable(" ".join(text.split()))
    return flat if len(flat) <= limit else f"{flat[: limit - 4]} ..."
