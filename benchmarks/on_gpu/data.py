"""Training rows: Python's own documentation, cut to drawn lengths."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np

from estimator.vocabulary import TASKS, Task
from launchers.dataset import python_docs

# Lengths are log-uniform from this share of the longest up to the longest: many short rows and few long
# ones, as in instruction data; the mean is a third of the longest.
SHORTEST_SHARE = 1 / 16
SPARE = 8  # extra tokens of the longest row, so that it is cut to exactly the full length
_SEED = 0


def lengths(rows: int, longest: int) -> list[int]:
    """Draw the number of tokens of each row; one row at a random place has the full length."""
    draw = np.random.default_rng(_SEED)
    drawn = np.exp(draw.uniform(math.log(longest * SHORTEST_SHARE), math.log(longest), rows))
    result = [int(value) for value in drawn]
    result[int(draw.integers(rows))] = longest + SPARE
    return result


def write(path: Path, model_dir: Path, rows: int, longest: int, task: Task = "pretrain") -> Path:
    """Write a JSONL file of ``rows`` texts of varying length in the model's tokens, in the form of the task.

    An existing file is kept.
    """
    if path.exists():
        return path
    from tokenizers import Tokenizer  # type: ignore[import-untyped,unused-ignore]

    text = "\n".join(message["content"] for row in python_docs.rows() for message in row["messages"])
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    starts = [start for start, _ in tokenizer.encode(text, add_special_tokens=False).offsets]
    lines, place = list[str](), 0
    for length in lengths(rows, longest):
        if place + length >= len(starts):
            place = 0
        row = _row(text[starts[place] : starts[place + length]], task, len(lines))
        lines.append(json.dumps(row) + "\n")
        place += length
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text("".join(lines), encoding="utf-8")
    return temporary.replace(path)


def _row(text: str, task: Task, number: int) -> dict[str, object]:
    """Return a text as a row of the task; prompts and rejected answers are parts of the text."""
    half = len(text) // 2
    prompt, answer = text[: half // 2], text[half // 2 :]
    if task == "kto":
        return {"prompt": prompt, "completion": answer, "label": number % 2 == 0}
    if task in ("reward", "grpo") or TASKS[task].preferences:
        return {"prompt": prompt, "chosen": answer, "rejected": answer[::-1]}
    return {"text": text}
