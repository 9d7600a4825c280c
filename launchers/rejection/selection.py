"""Selection of answers by score, and statistics of the scores; pure functions."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from estimator.errors import UserError
from launchers.dataset.prompts import Prompt
from launchers.dataset.rows import Conversation
from launchers.rejection.answers import Answers, Scores
from launchers.settings.sections import Rejection

SHOWN = 5  # number of best and of worst answers shown
MAX_BINS = 30


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """One answer to display."""

    prompt: str
    answer: str
    score: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Bin:
    """Number of scores from ``low`` to below ``high``; the last bin includes its ``high``."""

    low: float
    high: float
    answers: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Distribution:
    """Statistics of some answers' scores."""

    answers: int
    mean: float
    low: float
    high: float
    bins: tuple[Bin, ...]

    def text(self) -> str:
        """Format in one line."""
        return f"mean {self.mean:.4g}, from {self.low:.4g} to {self.high:.4g}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Overview:
    """Statistics of all answers, with the best and worst examples."""

    drawn: Distribution
    best: tuple[Example, ...]  # the best first
    worst: tuple[Example, ...]  # the worst first


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """Selected answer to one prompt, used for training."""

    index: int  # index of the prompt
    conversation: Conversation
    score: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """Statistics of all answers and of the selected ones."""

    prompts: int
    overview: Overview  # of all answers
    kept: Distribution  # of the selected answers
    empty: int  # answers without text, which are never selected
    cut: int  # selected answers that were truncated at the maximum length
    below: int  # prompts whose best answer is below min_score

    def text(self) -> str:
        """Format in two lines."""
        drawn = self.overview.drawn
        return (
            f"answers drawn: {drawn.answers:,} to {self.prompts:,} prompts; scores: {drawn.text()}\n"
            f"answers kept:  {self.kept.answers:,}; scores: {self.kept.text()}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Mean scores on held-out prompts before and after training, with equally many answers per prompt."""

    prompts: int
    before: float | None  # None: nothing was held out
    after: float | None

    def text(self) -> str:
        """Format in one line."""
        if self.before is None or self.after is None:
            reason = "the comparison failed" if self.prompts else "no prompts were held out"
            return f"mean score: not compared, {reason}"
        return (
            f"mean score of answers to {self.prompts:,} held-out prompts: "
            f"{self.before:.4g} before, {self.after:.4g} after"
        )


def distribution(scores: Sequence[float], like: Distribution | None = None) -> Distribution:
    """Compute mean, range and histogram of at least one score.

    ``like``: distribution whose bins are used, for a subset of its scores. Otherwise the number of bins is
    the square root of the number of scores, from 5 to ``MAX_BINS``; 1 if all scores are equal.
    """
    low, high = min(scores), max(scores)
    if like is not None:
        bins = [(item.low, item.high) for item in like.bins]
    elif high == low:
        bins = [(low, high)]
    else:
        count = min(MAX_BINS, max(5, math.ceil(math.sqrt(len(scores)))))
        edges = [low + place * (high - low) / count for place in range(count)] + [high]
        bins = list(itertools.pairwise(edges))
    counts = [0] * len(bins)
    lows = [bottom for bottom, _ in bins]
    for score in scores:
        counts[bisect.bisect_right(lows, score) - 1] += 1
    return Distribution(
        answers=len(scores),
        mean=math.fsum(scores) / len(scores),
        low=low,
        high=high,
        bins=tuple(
            Bin(low=bottom, high=top, answers=n) for (bottom, top), n in zip(bins, counts, strict=True)
        ),
    )


def select(
    prompts: Sequence[Prompt], answers: Sequence[Answers], scores: Sequence[Scores], settings: Rejection
) -> tuple[list[Kept], Selection]:
    """Select the best answer to each prompt, in the order of the prompts, and compute statistics.

    Of equal scores the first is the best. Raises UserError if nothing is left.
    """
    answers_of = {item.index: item.answers for item in answers}
    scores_of = {item.index: item.scores for item in scores}
    best = []
    for prompt in prompts:
        pairs = zip(scores_of[prompt.index], answers_of[prompt.index], strict=True)
        usable = [(score, answer) for score, answer in pairs if answer.text.strip()]
        if usable:
            score, answer = max(usable, key=lambda pair: pair[0])
            best.append((score, prompt, answer))
    min_score = -math.inf if settings.min_score is None else settings.min_score
    eligible = [item for item in best if item[0] >= min_score]
    count = math.ceil(settings.top_share * len(eligible))
    selected = sorted(eligible, key=lambda item: -item[0])[:count]
    selected.sort(key=lambda item: item[1].index)
    if not selected:
        best_score = f"; the best of all has {max(score for score, _, _ in best):g}" if best else ""
        raise UserError(
            f"No answer is left to train on: of {len(prompts):,} prompts {len(prompts) - len(best):,} have "
            f"no answer with any text, and {len(best) - len(eligible):,} none with a score of "
            f"{min_score:g} or more{best_score}.",
            "Lower --rejection-min-score, or sample more answers: --answers.",
        )
    kept = [
        Kept(index=prompt.index, conversation=prompt.with_answer(answer.text), score=score)
        for score, prompt, answer in selected
    ]
    statistics = overview(prompts, answers, scores)
    return kept, Selection(
        prompts=len(prompts),
        overview=statistics,
        kept=distribution([item.score for item in kept], statistics.drawn),
        empty=sum(not answer.text.strip() for item in answers for answer in item.answers),
        cut=sum(not answer.ended for _, _, answer in selected),
        below=len(best) - len(eligible),
    )


def overview(prompts: Sequence[Prompt], answers: Sequence[Answers], scores: Sequence[Scores]) -> Overview:
    """Compute statistics of all answers to these prompts."""
    answers_of = {item.index: item.answers for item in answers}
    scores_of = {item.index: item.scores for item in scores}
    examples = [
        Example(prompt=prompt.shown, answer=answer.text, score=score)
        for prompt in prompts
        for score, answer in zip(scores_of[prompt.index], answers_of[prompt.index], strict=True)
    ]
    ranked = sorted(examples, key=lambda item: -item.score)
    return Overview(
        drawn=distribution([item.score for item in examples]),
        best=tuple(ranked[:SHOWN]),
        worst=tuple(ranked[::-1][:SHOWN]),
    )


def mean_of(scores: Sequence[Scores], indices: Collection[int]) -> float | None:
    """Return the mean score of all answers to these prompts; None without answers."""
    index_set = set(indices)
    values = [score for item in scores if item.index in index_set for score in item.scores]
    return math.fsum(values) / len(values) if values else None
