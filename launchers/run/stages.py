"""Stages after training: evaluation, benchmark tasks, upload to the Hub, closing report.

Metaflow's steps (flows/finetune/steps.py) and jobs of a scheduler (launchers/scheduler/run.py) call the same
functions. If a measurement or an upload fails, the trained model is still saved: :func:`attempt` prints the
error, and the run continues.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from estimator.errors import UserError
from estimator.plan import Plan
from estimator.terminal import print
from launchers.evaluation.evaluate import EvaluationRequest
from launchers.evaluation.evaluate import evaluate as run_evaluation
from launchers.evaluation.result import EvaluationResult
from launchers.harness.result import HarnessResult
from launchers.harness.run import HarnessRequest, run_tasks
from launchers.results import hub_push
from launchers.results.handover import gguf_command
from launchers.results.model_card import Facts
from launchers.run_config import RunConfig

EVALUATION, HARNESS, PUSH = "evaluation", "task scores", "push to the Hub"

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class StageResult(Generic[T]):
    """Return value of a stage, or the first line of its error; both None if there was nothing to do."""

    value: T | None = None
    error: str | None = None


def attempt(stage: str, work: Callable[[], T]) -> StageResult[T]:
    """Run ``work``; print its error to standard error, and return it instead of raising it.

    Catches only UserError and RuntimeError, which the stages raise for failed processes, exceeded time limits
    and refused uploads. Signals, and errors in this package's code, end the run.
    """
    try:
        return StageResult(value=work())
    except (UserError, RuntimeError) as error:
        print(f"The {stage} failed; the model is saved without it.", file=sys.stderr)
        print(error, file=sys.stderr, flush=True)
        return StageResult(error=error.problem if isinstance(error, UserError) else str(error))


def evaluate(
    settings: RunConfig,
    plan: Plan,
    *,
    base_dir: Path,
    model_dir: Path,
    data_dir: Path,
    work: Path,
    reward: str | None = None,
) -> EvaluationResult:
    """Measure the base model and the finished model on the held-out rows, and print the scores.

    Parameters
    ----------
    data_dir:
        Prepared data, with the held-out rows in ``heldout``.
    reward:
        Reward function or model of task grpo, as a path on this machine.

    Raises
    ------
    UserError
        The evaluation's process failed or exceeded its time limit.
    """
    result = run_evaluation(
        EvaluationRequest(
            base_dir=base_dir,
            model_dir=model_dir,
            data_dir=data_dir,
            settings=settings,
            work_dir=work,
            generations=settings.evaluation.answers,
            max_new_tokens=settings.evaluation.max_new_tokens,
            device=plan.layout.device,
            reward=reward,
        )
    )
    print(result.text(), flush=True)
    return result


def score_tasks(request: HarnessRequest, on_model: Callable[[Path], None] = lambda _: None) -> HarnessResult:
    """Score both models on lm-evaluation-harness tasks, and print the scores.

    ``on_model`` is called with each model's score file as soon as it is complete. Raises UserError or
    RuntimeError as :func:`launchers.harness.run.run_tasks` does.
    """
    result = run_tasks(request, on_model)
    print(result.text(), flush=True)
    return result


def push(folder: Path, page: str, settings: RunConfig, *, model_dir: Path) -> str:
    """Upload the finished model in ``folder`` to the Hub; return its URL.

    ``model_dir``: final location of the model; a UserError has the command to upload it from there later.
    """
    try:
        return hub_push.push(folder, page, settings)
    except UserError as error:
        command = f"hf upload {settings.export.push} {model_dir}"
        raise UserError(error.problem, f"To upload the model later: {command}") from error


def _joined(parts: Sequence[str], width: int = 80) -> list[str]:
    """Join parts with semicolons into lines of at most ``width`` columns."""
    lines: list[str] = []
    for part in parts:
        if lines and len(lines[-1]) + len(part) + 2 <= width:
            lines[-1] += f"; {part}"
        else:
            lines.append(part)
    return lines


def closing_lines(
    facts: Facts,
    evaluation: EvaluationResult | None,
    model_dir: Path,
    *,
    url: str | None = None,
    errors: Mapping[str, str | None] | None = None,
) -> list[str]:
    """Format the report of a finished run: example answers, measurements, model location, failed stages.

    ``url``: address of the model on the Hub, if it was uploaded. ``errors``: error message by stage; None for
    a stage that succeeded.
    """
    lines = evaluation.table().splitlines() if evaluation else []
    lines += _joined([f"{name}: {value}" for name, value in facts])
    lines.append(f"model: {model_dir}")
    if command := gguf_command(model_dir):
        lines.append(f"GGUF: {command}")
    if url:
        lines.append(f"pushed: {url}")
    lines += [f"Warning: {stage}: {error}" for stage, error in (errors or {}).items() if error]
    return lines
