"""Scoring of answers by a user's function or a reward model.

``python -m launchers.rejection.scoring request.json`` scores shards of answers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from launchers.base.imports import collector_paused
from launchers.base.request_process import read_request, serve, write_request
from launchers.dataset import prompts
from launchers.dataset.prompts import Prompt
from launchers.rejection import answers as rows
from launchers.rejection.answers import Answers, Scores
from launchers.rejection.shards import make_shards
from launchers.scoring.functions import load_function, score_by
from launchers.scoring.reward_model import RewardModel
from launchers.settings import Settings


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoringRequest:
    """Input of the scoring process. Either ``function`` or ``model_dir`` is set."""

    score: str  # the user's setting, for error messages
    function: str | None = None  # file.py:name or module:name, on this machine
    model_dir: Path | None = None  # folder of a reward model
    prompts: Path  # rows of Prompt
    answers_dir: Path  # shards of Answers
    shards_dir: Path  # receives the shards of Scores
    shards: int
    work_dir: Path  # receives request.json and request.log
    settings: Settings
    device: Literal["cuda", "cpu"]

    def save(self) -> Path:
        """Write request.json into the work folder."""
        self.shards_dir.mkdir(parents=True, exist_ok=True)
        return write_request(self.work_dir / "request.json", self)


def score(request: ScoringRequest, on_shard: Callable[[int, Path], None]) -> None:
    """Compute all missing shards of scores.

    Raises UserError for user errors, RuntimeError if the process was ended; calling it again continues with
    the missing shards.
    """
    make_shards(
        "launchers.rejection.scoring",
        request.save(),
        request.shards_dir,
        range(request.shards),
        name="scoring answers",
        device=request.device if request.model_dir else "cpu",
        limit_s=request.settings.resources.hang_timeout_s,
        on_shard=on_shard,
    )


def main(path: Path) -> None:
    """Score the missing shards in this process."""
    request = read_request(ScoringRequest, path)
    prompt_by_index = {prompt.index: prompt for prompt in prompts.read_prompts(request.prompts)}
    scorer = _function_scorer(request) if request.function else _model_scorer(request)
    for shard in range(request.shards):
        file = request.shards_dir / rows.shard_name(shard)
        if not file.is_file():
            answers = rows.read_answers(request.answers_dir / rows.shard_name(shard))
            rows.write_rows(file, scorer([(prompt_by_index[item.index], item) for item in answers]))


def _function_scorer(request: ScoringRequest) -> Callable[[Sequence[tuple[Prompt, Answers]]], list[Scores]]:
    function = load_function(str(request.function), request.score)

    def scores(prompts_with_answers: Sequence[tuple[Prompt, Answers]]) -> list[Scores]:
        return [
            Scores(
                index=prompt.index,
                scores=tuple(
                    score_by(function, request.score, prompt.shown, answer.text) for answer in item.answers
                ),
            )
            for prompt, item in prompts_with_answers
        ]

    return scores


def _model_scorer(request: ScoringRequest) -> Callable[[Sequence[tuple[Prompt, Answers]]], list[Scores]]:
    from launchers.evaluation.loading import load_model, precision_on

    folder = request.model_dir or Path()
    model = load_model(folder, folder, request.device, precision_on(request.device))
    rewards_of = RewardModel(folder, model, request.score).rewards

    def scores(prompts_with_answers: Sequence[tuple[Prompt, Answers]]) -> list[Scores]:
        each_of = iter(
            rewards_of(
                [
                    prompt.with_answer(answer.text)
                    for prompt, item in prompts_with_answers
                    for answer in item.answers
                ]
            )
        )
        return [
            Scores(index=prompt.index, scores=tuple(next(each_of) for _ in item.answers))
            for prompt, item in prompts_with_answers
        ]

    return scores


if __name__ == "__main__":
    with collector_paused():
        serve(main)
