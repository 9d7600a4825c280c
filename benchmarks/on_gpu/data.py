"""Training rows: Python's own documentation, cut to drawn lengths."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np

from launchers.dataset import python_docs

# Lengths are drawn uniformly in their logarithm between the longest and this part of it: many short rows and
# few long ones, as instruction data have them; their mean is a third of the longest.
SHORTEST_SHARE = 1 / 16
SPARE = 8  # tokens that the longest row has too many, so that it is cut to the full length
_SEED = 0


def lengths(rows: int, longest: int) -> list[int]:
    """Tokens of each row; one of them, somewhere, has the full length."""
    draw = np.random.default_rng(_SEED)
    drawn = np.exp(draw.uniform(math.log(longest * SHORTEST_SHARE), math.log(longest), rows))
    result = [int(value) for value in drawn]
    result[int(draw.integers(rows))] = longest + SPARE
    return result


def write(path: Path, model_dir: Path, rows: int, longest: int) -> Path:
    """A JSONL file of ``rows`` texts of such lengths, by the model's tokenizer; one that is there stays."""
    if path.exists():
        return path
    from tokenizers import Tokenizer  # type: ignore[import-untyped,unused-ignore]

    text = "\n".join(message["content"] for row in python_docs.rows() for message in row["messages"])
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    starts = [start for start, _ in tokenizer.encode(text, add_special_tokens=False).offsets]
    lines, place = [], 0
    for length in lengths(rows, longest):
        if place + length >= len(starts):
            place = 0
        lines.append(json.dumps({"text": text[starts[place] : starts[place + length]]}) + "\n")
        place += length
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text("".join(lines), encoding="utf-8")
    return temporary.replace(path)
