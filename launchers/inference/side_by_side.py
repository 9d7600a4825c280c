"""Answers of several models to the same prompts, side by side, optionally blind and scored."""

from __future__ import annotations

import gc
import json
import random
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from estimator.errors import UserError
from launchers.inference import memory
from launchers.inference.conversation import Conversation, LoadedModel, Sampling, load_base, load_finetuned
from launchers.inference.finished import FinishedModel
from launchers.inference.memory import Device

BASE = "base"
PROGRESS_INTERVAL_S = 10.0
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One prompt with an answer, and a score if there is a scorer, in each column."""

    prompt: str
    answers: tuple[str, ...]
    scores: tuple[float, ...] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Columns of answers. ``key``: if the columns are blind, each row's model by column."""

    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    key: tuple[tuple[str, ...], ...] | None = None

    @property
    def means(self) -> tuple[float, ...] | None:
        """Mean score of each column; None without scores, and for blind columns, which mix models."""
        if self.key is not None:
            return None
        columns = zip(*(row.scores for row in self.rows if row.scores is not None), strict=True)
        return tuple(fmean(column) for column in columns) or None

    def blind(self, seed: int) -> Comparison:
        """Shuffle the answers of each prompt into columns A, B, ..., and keep the key."""
        generator = random.Random(seed)
        rows, key = [], []
        for row in self.rows:
            order = generator.sample(range(len(self.columns)), len(self.columns))
            scores = None if row.scores is None else tuple(row.scores[index] for index in order)
            answers = tuple(row.answers[index] for index in order)
            rows.append(Row(prompt=row.prompt, answers=answers, scores=scores))
            key.append(tuple(self.columns[index] for index in order))
        letters = tuple(LETTERS[: len(self.columns)])
        return Comparison(columns=letters, rows=tuple(rows), key=tuple(key))

    def key_json(self) -> str:
        """Return the model of each answer in a blind comparison, and the models' mean scores, as JSON."""
        key = self.key or ()
        scores: dict[str, list[float]] = {}
        for row, names in zip(self.rows, key, strict=True):
            for name, score in zip(names, row.scores or (), strict=row.scores is not None):
                scores.setdefault(name, []).append(score)
        prompts = [
            {"prompt": row.prompt, **dict(zip(self.columns, names, strict=True))}
            for row, names in zip(self.rows, key, strict=True)
        ]
        means = {name: fmean(values) for name, values in sorted(scores.items())}
        return json.dumps({"prompts": prompts, "mean_scores": means}, indent=1) + "\n"


def read_prompts(path: Path) -> list[str]:
    """Read prompts: lines of text, or JSON objects with ``prompt`` or ``messages`` (its last user message).

    Raises UserError for a file without prompts, and for a line that has none.
    """
    try:
        lines = path.expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise UserError(
            f"Prompts {path} cannot be read: {reason}.", "Give a text or JSON Lines file."
        ) from None
    numbered = [(number, line.strip()) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise UserError(f"{path} has no prompts.", "Write one per line.")
    if path.suffix != ".jsonl":
        return [line for _, line in numbered]
    return [_prompt_of(line, f"{path}, line {number}") for number, line in numbered]


def _prompt_of(line: str, location: str) -> str:
    try:
        row = json.loads(line)
    except ValueError:
        row = None
    if isinstance(row, dict):
        turns = row.get("messages")
        user_messages = [
            turn.get("content")
            for turn in (turns if isinstance(turns, list) else ())
            if isinstance(turn, dict) and turn.get("role") == "user"
        ]
        prompt = row.get("prompt", user_messages[-1] if user_messages else None)
        if isinstance(prompt, str) and prompt:
            return prompt
    raise UserError(f"{location}: there is no prompt.", 'Write {"prompt": "..."} or {"messages": [...]}.')


def compare(
    models: Mapping[str, FinishedModel],
    prompts: Sequence[str],
    sampling: Sampling,
    device: Device,
    *,
    base_of: FinishedModel | None = None,
    score: Callable[[Sequence[str], Sequence[str]], Sequence[float]] | None = None,
    on_progress: Callable[[str, int], None] = lambda *_: None,
) -> Comparison:
    """Generate and score all answers, with one model after the other in memory.

    Parameters
    ----------
    models:
        Finished models by the name of their column.
    base_of:
        Finished model whose base model answers in an additional last column, with the same chat template.
    score:
        Returns one score per prompt and answer. Called after all models were removed from memory.
    on_progress:
        Called with a column's name and the number of its answers, at the start and every few seconds.
    """
    columns: dict[str, list[str]] = {}
    for name, model in models.items():
        columns[name] = _answers(name, model, prompts, sampling, device, on_progress)
    if base_of is not None:
        columns[BASE] = _answers(BASE, base_of, prompts, sampling, device, on_progress, of_base=True)
    scored = None if score is None else [score(prompts, answers) for answers in columns.values()]
    rows = []
    for index, prompt in enumerate(prompts):
        answers = tuple(column[index] for column in columns.values())
        scores = None if scored is None else tuple(column[index] for column in scored)
        rows.append(Row(prompt=prompt, answers=answers, scores=scores))
    return Comparison(columns=tuple(columns), rows=tuple(rows))


def _answers(
    name: str,
    model: FinishedModel,
    prompts: Sequence[str],
    sampling: Sampling,
    device: Device,
    on_progress: Callable[[str, int], None],
    *,
    of_base: bool = False,
) -> list[str]:
    on_progress(name, 0)
    memory.check_conversation(model, device, new_tokens=sampling.max_new_tokens, with_base=of_base)
    with tempfile.TemporaryDirectory(prefix="finetune-runs-") as work:
        loaded = load_finetuned(model, device, Path(work))
        if of_base:
            loaded = load_base(loaded, model, device)
        answers: list[str] = []
        reported = time.monotonic()
        for prompt in prompts:
            if time.monotonic() - reported > PROGRESS_INTERVAL_S:
                on_progress(name, len(answers))
                reported = time.monotonic()
            answers.append(_answer(loaded, prompt, sampling))
    del loaded
    gc.collect()
    if device == "cuda":
        import torch

        torch.cuda.empty_cache()
    return answers


def _answer(loaded: LoadedModel, prompt: str, sampling: Sampling) -> str:
    return Conversation(loaded=loaded, sampling=sampling).ask(prompt).text
