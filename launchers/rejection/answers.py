"""Prompts, answers and scores of rejection sampling, exchanged between its stages as JSON lines.

Rows are grouped into shards, files of several prompts each. Shard ``k`` of the answers and shard ``k`` of the
scores cover the same prompts.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launchers.dataset.prompts import Prompt
from launchers.settings import Settings

SHARD_ANSWERS = 64  # approximate answers per shard, at least one batch; a kill loses the current shard


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchLimit:
    """Maximum size of a generation batch. One prompt's answers are always sampled together."""

    sequences: int  # answers
    tokens: int  # summed over all answers, padding and new tokens included

    def prompts(self, longest: int, answers_each: int) -> int:
        """Return the number of prompts per batch, at least 1; ``longest``: tokens of prompt and answer."""
        return max(1, min(self.sequences, self.tokens // longest) // answers_each)


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """One sampled answer."""

    text: str
    tokens: int  # number of generated tokens, including the end token
    ended: bool  # False: truncated at the maximum length


@dataclass(frozen=True, kw_only=True, slots=True)
class Ends:
    """End tokens of a model, and the tokenizer that decodes its answers."""

    ids: frozenset[int]
    tokenizer: Any

    @classmethod
    def of(cls, generation_config: Any, tokenizer: Any) -> Ends:
        """Read the end tokens from the generation config, or from the tokenizer if it has none."""
        eos_ids = generation_config.eos_token_id
        eos_ids = tokenizer.eos_token_id if eos_ids is None else eos_ids
        end_ids = eos_ids if isinstance(eos_ids, (list, tuple)) else [eos_ids]
        return cls(ids=frozenset(token for token in end_ids if token is not None), tokenizer=tokenizer)

    def answer(self, tokens: Sequence[int]) -> Answer:
        """Decode an answer; tokens after its end token are padding."""
        end = next((place for place, token in enumerate(tokens) if token in self.ids), None)
        tokens = tokens if end is None else tokens[: end + 1]
        text = self.tokenizer.decode(tokens, skip_special_tokens=True)
        return Answer(text=text, tokens=len(tokens), ended=end is not None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Answers:
    """All answers to one prompt."""

    index: int  # index of the prompt
    answers: tuple[Answer, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Scores:
    """Scores of all answers to one prompt, in the order of the answers."""

    index: int  # index of the prompt
    scores: tuple[float, ...]


def shards_of(
    prompts: Sequence[Prompt], answers_each: int, *, limit: BatchLimit, new_tokens: int
) -> list[list[Prompt]]:
    """Divide the prompts into shards, longest first: each is one batch, or about ``SHARD_ANSWERS`` answers.

    Prompts of similar length share a batch, and the memory peak occurs at the beginning. ``new_tokens``:
    maximum answer length.
    """
    remaining = sorted(prompts, key=lambda prompt: (-prompt.tokens, prompt.index))
    shards = []
    while remaining:
        batch = limit.prompts(remaining[0].tokens + new_tokens, answers_each)
        size = max(batch, SHARD_ANSWERS // answers_each)
        shards.append(remaining[:size])
        remaining = remaining[size:]
    return shards


def max_prompt_tokens(config: Any, settings: Settings) -> int:
    """Return the prompt tokens that fit before the longest answer; ``config``: of transformers."""
    longest = getattr(config, "max_position_embeddings", None) or 2**31
    return max(1, longest - settings.rejection.max_new_tokens)


def seed_of(*values: object) -> int:
    """Derive a seed below 2**60 from these values."""
    return int(fingerprint(*values)[:15], 16)


def shard_name(shard: int) -> str:
    """Return the file name of a shard."""
    return f"shard-{shard:05d}.jsonl"


def fingerprint(*values: object) -> str:
    """Hash JSON-compatible values to a short name."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def write_rows(path: Path, rows: Iterable[Prompt | Answers | Scores]) -> None:
    """Write a file of rows atomically."""
    temporary = path.with_name(f"{path.name}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(dataclasses.asdict(row)) + "\n")
    temporary.replace(path)


def read_answers(path: Path) -> list[Answers]:
    """Read the answers of a shard."""
    return [
        Answers(index=row["index"], answers=tuple(Answer(**answer) for answer in row["answers"]))
        for row in _rows(path)
    ]


def read_scores(path: Path) -> list[Scores]:
    """Read the scores of a shard."""
    return [Scores(index=row["index"], scores=tuple(row["scores"])) for row in _rows(path)]


def _rows(path: Path) -> list[dict[str, Any]]:
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]
