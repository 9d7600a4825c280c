"""Answers of runs to the same prompts, for ``finetune runs --prompts``: in the terminal and as a page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from decorators import finished_models
from decorators.card import blocks
from estimator import models
from estimator.cli.output import note, write_text
from estimator.errors import UserError
from estimator.formatting import printable
from launchers.base.imports import imported_quietly
from launchers.dataset.prompts import Prompt
from launchers.dataset.turns import Message
from launchers.inference import memory, side_by_side
from launchers.inference.conversation import Sampling
from launchers.inference.side_by_side import BASE, LETTERS, Comparison
from launchers.scoring.functions import load_function, scorer_of
from launchers.scoring.rewards import rewards_of

SHOWN = 300  # characters of an answer in the terminal


def compare_runs(
    flow: str, runs: Sequence[str], *, prompts: Path, score: str | None, key: Path | None, max_new_tokens: int
) -> Comparison:
    """Generate answers of the runs' models to the prompts; a single run, or the word ``base``, adds its base
    model.

    ``key``: file that gets the key of a blind comparison. Raises UserError before any model is loaded if a
    file, a run or the scoring function is missing.
    """
    texts = side_by_side.read_prompts(prompts)
    if len(runs) >= len(LETTERS):
        raise UserError(f"{len(runs)} runs are too many to compare.", f"Name at most {len(LETTERS) - 1}.")
    if score is not None:
        _check_scorer(score)
    models = {run: finished_models.find(f"{flow}/{run.rpartition('/')[2]}") for run in runs if run != BASE}
    if not models:
        raise UserError("There is no run to compare with base.", "Name a run before base.")
    for model in models.values():
        model.spec()
    first = next(iter(models.values()))
    with imported_quietly():
        device = memory.pick_device("auto")
    comparison = side_by_side.compare(
        models,
        texts,
        Sampling(max_new_tokens=max_new_tokens, temperature=0),
        device,
        base_of=first if BASE in runs or len(models) == 1 else None,
        score=None if score is None else _scores_by(score, device),
        on_progress=lambda name, done: note(f"{name}: {done:,} of {len(texts):,} prompts answered"),
    )
    if key is None:
        return comparison
    blind = comparison.blind(seed=len(texts))
    write_text(key, blind.key_json())
    note(f"key of the blind columns: {key}")
    return blind


def _check_scorer(score: str) -> None:
    """Raise UserError if there is no such function, or the folder is not a reward model."""
    from launchers.scoring.reward_model import check_reward_model

    if scorer_of(score).function is not None:
        load_function(score, score)
    else:
        check_reward_model(Path(score), "score", score)


def _scores_by(score: str, device: memory.Device) -> Callable[[Sequence[str], Sequence[str]], list[float]]:
    """Return the function that scores answers to prompts; it loads a reward model at its first call."""

    @cache
    def rewards() -> Callable[[Sequence[Prompt], Sequence[str]], list[float]]:
        if scorer_of(score).function is None:
            spec = models.resolve(score).spec
            batch = memory.conversation_batch(spec, memory.CONTEXT, 1)
            memory.check_memory(score, spec, batch, memory.free_memory(device))
            note(f"{score}: scoring")
        return rewards_of(score, score, device, bf16=device == "cuda")

    def scores(prompts: Sequence[str], answers: Sequence[str]) -> list[float]:
        asked = [
            Prompt(index=i, text=text, shown=text, tokens=0, messages=(Message(role="user", content=text),))
            for i, text in enumerate(prompts)
        ]
        with imported_quietly():
            return rewards()(asked, answers)

    return scores


def terminal_table(comparison: Comparison) -> Table:
    """Return a table with one row per prompt and one column per model; long answers are cut."""
    is_cut = any(len(answer) > SHOWN for row in comparison.rows for answer in row.answers)
    caption = f"Answers longer than {SHOWN} characters are cut; --html and --json have them whole."
    table = Table(box=SIMPLE_HEAD, show_lines=True, caption=caption if is_cut else None)
    for name in ("prompt", *comparison.columns):
        table.add_column(name, overflow="fold", ratio=1)
    for row in _cells(comparison, SHOWN):
        table.add_row(*(Text(printable(cell)) for cell in row))
    return table


def page_blocks(comparison: Comparison) -> list[Any]:
    """Return the answers as blocks of a page."""
    rows = tuple(_cells(comparison))
    return [
        blocks.Text(markdown=f"### Answers to {len(comparison.rows):,} prompts"),
        blocks.Grid(headers=("prompt", *comparison.columns), rows=rows),
    ]


def _cells(comparison: Comparison, limit: int | None = None) -> list[tuple[str, ...]]:
    """Return prompts, answers and scores as text; answers longer than ``limit`` are cut."""
    rows = []
    for row in comparison.rows:
        scores = row.scores or (None,) * len(row.answers)
        answers = [
            answer if score is None else f"{answer}\n(score {score:.4g})"
            for answer, score in zip(map(partial(_cut, limit), row.answers), scores, strict=True)
        ]
        rows.append((row.prompt, *answers))
    if comparison.means is not None:
        rows.append(("mean score", *(f"{mean:.4g}" for mean in comparison.means)))
    return rows


def _cut(limit: int | None, answer: str) -> str:
    return answer if limit is None or len(answer) <= limit else f"{answer[:limit]} ..."
