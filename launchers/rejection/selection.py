"""Which answers are kept, and what their scores are like: pure functions of scores."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from estimator.errors import Change, UserError
from launchers.dataset.prompts import Prompt
from launchers.dataset.rows import Conversation
from launchers.rejection.answers import Answers, Scores
from launchers.sections import Rejection

SHOWN = 5  # best answers, and as many of the worst, that a selection shows
MOST_BINS = 30


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """One answer to be shown."""

    prompt: str
    answer: str
    score: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Bin:
    """How many scores are from ``low`` to below ``high``; the last bin's ``high`` is in it."""

    low: float
    high: float
    answers: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Distribution:
    """The scores of some answers."""

    answers: int
    mean: float
    low: float
    high: float
    bins: tuple[Bin, ...]

    def text(self) -> str:
        """In a line."""
        return f"mean {self.mean:.4g}, from {self.low:.4g} to {self.high:.4g}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Overview:
    """All answers by their scores."""

    drawn: Distribution
    best: tuple[Example, ...]  # the best first
    worst: tuple[Example, ...]  # the worst first


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """The answer to one prompt that is trained on."""

    index: int  # the prompt's
    conversation: Conversation
    score: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """What was chosen from, and what was kept."""

    prompts: int
    overview: Overview  # of all answers
    kept: Distribution  # of those that are trained on
    empty: int  # answers without any text, which are never kept
    cut: int  # kept answers that end where the longest length was reached
    below: int  # prompts whose best answer is below min_score

    def text(self) -> str:
        """In two lines."""
        drawn = self.overview.drawn
        return (
            f"answers drawn: {drawn.answers:,} to {self.prompts:,} prompts; scores: {drawn.text()}\n"
            f"answers kept:  {self.kept.answers:,}; scores: {self.kept.text()}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Mean scores of the answers to held-out prompts, as many to each before training as after."""

    prompts: int
    before: float | None  # None: nothing was held out
    after: float | None

    def text(self) -> str:
        """In a line."""
        if self.before is None or self.after is None:
            reason = "the comparison failed" if self.prompts else "no prompts were held out"
            return f"mean score: not compared, {reason}"
        return (
            f"mean score of answers to {self.prompts:,} held-out prompts: "
            f"{self.before:.4g} before, {self.after:.4g} after"
        )


def distribution(scores: Sequence[float], like: Distribution | None = None) -> Distribution:
    """Mean, range and histogram of at least one score.

    ``like``: of scores that these are some of, whose bins are taken. Otherwise there are as many bins as the
    square root of the number of scores, from 5 to ``MOST_BINS``; one where all scores are the same.
    """
    low, high = min(scores), max(scores)
    if like is not None:
        bins = [(each.low, each.high) for each in like.bins]
    elif high == low:
        bins = [(low, high)]
    else:
        count = min(MOST_BINS, max(5, math.ceil(math.sqrt(len(scores)))))
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
    """The best answer to each prompt, in the order of the prompts, and what became of the others.

    Of answers with the same score the first one is the best. Raises UserError where nothing is left.
    """
    answers_of = {each.index: each.answers for each in answers}
    scores_of = {each.index: each.scores for each in scores}
    best = []
    for prompt in prompts:
        own = zip(scores_of[prompt.index], answers_of[prompt.index], strict=True)
        usable = [(score, answer) for score, answer in own if answer.text.strip()]
        if usable:
            score, answer = max(usable, key=lambda pair: pair[0])
            best.append((score, prompt, answer))
    least = -math.inf if settings.min_score is None else settings.min_score
    enough = [each for each in best if each[0] >= least]
    count = math.ceil(settings.top_share * len(enough))
    taken = sorted(enough, key=lambda each: -each[0])[:count]
    taken.sort(key=lambda each: each[1].index)
    if not taken:
        found = f"; the best of all has {max(score for score, _, _ in best):g}" if best else ""
        raise UserError(
            f"No answer is left to train on: of {len(prompts):,} prompts {len(prompts) - len(best):,} have "
            f"no answer with any text, and {len(best) - len(enough):,} none with a score of "
            f"{least:g} or more{found}.",
            (
                "Lower ",
                Change("rejection.min_score"),
                ", or draw more answers: ",
                Change("rejection.answers"),
                ".",
            ),
        )
    kept = [
        Kept(index=prompt.index, conversation=prompt.with_answer(answer.text), score=score)
        for score, prompt, answer in taken
    ]
    seen = overview(prompts, answers, scores)
    return kept, Selection(
        prompts=len(prompts),
        overview=seen,
        kept=distribution([each.score for each in kept], seen.drawn),
        empty=sum(not answer.text.strip() for each in answers for answer in each.answers),
        cut=sum(not answer.ended for _, _, answer in taken),
        below=len(best) - len(enough),
    )


def overview(prompts: Sequence[Prompt], answers: Sequence[Answers], scores: Sequence[Scores]) -> Overview:
    """How all answers to these prompts were scored."""
    answers_of = {each.index: each.answers for each in answers}
    scores_of = {each.index: each.scores for each in scores}
    examples = [
        Example(prompt=prompt.shown, answer=answer.text, score=score)
        for prompt in prompts
        for score, answer in zip(scores_of[prompt.index], answers_of[prompt.index], strict=True)
    ]
    ranked = sorted(examples, key=lambda each: -each.score)
    return Overview(
        drawn=distribution([each.score for each in examples]),
        best=tuple(ranked[:SHOWN]),
        worst=tuple(ranked[::-1][:SHOWN]),
    )


def mean_of(scores: Sequence[Scores], indices: Collection[int]) -> float | None:
    """The mean score of all answers to these prompts; None where there are none."""
    wanted = set(indices)
    values = [score for each in scores if each.index in wanted for score in each.scores]
    return math.fsum(values) / len(values) if values else None
