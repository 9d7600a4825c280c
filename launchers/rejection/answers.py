"""Prompts, answers and scores: what the stages of rejection sampling hand on, as JSON lines.

Rows are kept in shards, files of some prompts each. Shard ``k`` of the answers and shard ``k`` of the scores
are about the same prompts.
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

SHARD_ANSWERS = 64  # answers in a shard, about, or one batch where that is more: what a kill loses


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchLimit:
    """What the model is given at once, at most. One prompt's answers are always drawn together."""

    sequences: int  # answers
    tokens: int  # of all answers together, padding and new tokens included

    def prompts(self, longest: int, answers_each: int) -> int:
        """How many prompts' answers that is, one's at least; ``longest``: tokens of prompt and answer."""
        return max(1, min(self.sequences, self.tokens // longest) // answers_each)


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """One drawn answer."""

    text: str
    tokens: int  # that were generated, the one that ends the answer included
    ended: bool  # False: cut at the longest length


@dataclass(frozen=True, kw_only=True, slots=True)
class Ends:
    """Makes answers of drawn tokens: which of them end one, and how the others are read."""

    ids: frozenset[int]
    tokenizer: Any

    @classmethod
    def of(cls, generation_config: Any, tokenizer: Any) -> Ends:
        """The end tokens that a model's generation config names, else the tokenizer's own."""
        ends = generation_config.eos_token_id
        ends = tokenizer.eos_token_id if ends is None else ends
        found = ends if isinstance(ends, (list, tuple)) else [ends]
        return cls(ids=frozenset(each for each in found if each is not None), tokenizer=tokenizer)

    def answer(self, tokens: Sequence[int]) -> Answer:
        """An answer from its tokens, of which those behind its end are padding."""
        end = next((place for place, token in enumerate(tokens) if token in self.ids), None)
        tokens = tokens if end is None else tokens[: end + 1]
        text = self.tokenizer.decode(tokens, skip_special_tokens=True)
        return Answer(text=text, tokens=len(tokens), ended=end is not None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Answers:
    """All answers to one prompt."""

    index: int  # the prompt's
    answers: tuple[Answer, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Scores:
    """The scores of all answers to one prompt, in the order of the answers."""

    index: int  # the prompt's
    scores: tuple[float, ...]


def shards_of(
    prompts: Sequence[Prompt], answers_each: int, *, limit: BatchLimit, new_tokens: int
) -> list[list[Prompt]]:
    """The prompts in shards, the longest prompts first: each a batch, or about ``SHARD_ANSWERS`` answers.

    Prompts of similar length are generated for together, and memory is used most at the beginning.
    ``new_tokens``: of the longest answer.
    """
    left = sorted(prompts, key=lambda prompt: (-prompt.tokens, prompt.index))
    shards = []
    while left:
        batch = limit.prompts(left[0].tokens + new_tokens, answers_each)
        size = max(batch, SHARD_ANSWERS // answers_each)
        shards.append(left[:size])
        left = left[size:]
    return shards


def prompt_room(config: Any, settings: Settings) -> int:
    """How many tokens of a prompt a model reads before its longest answer; ``config``: transformers' own."""
    longest = getattr(config, "max_position_embeddings", None) or 2**31
    return max(1, longest - settings.rejection.max_new_tokens)


def seed_of(*values: object) -> int:
    """A number below 2**60 that follows from these values, to draw with."""
    return int(fingerprint(*values)[:15], 16)


def shard_name(shard: int) -> str:
    """The name of a shard's file."""
    return f"shard-{shard:05d}.jsonl"


def fingerprint(*values: object) -> str:
    """A short name for these values; other values have another one. They need to be JSON's own types."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def write_rows(path: Path, rows: Iterable[Prompt | Answers | Scores]) -> None:
    """Write a file of rows, whole or not at all."""
    temporary = path.with_name(f"{path.name}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(dataclasses.asdict(row)) + "\n")
    temporary.replace(path)


def read_answers(path: Path) -> list[Answers]:
    """The answers of a shard."""
    return [
        Answers(index=row["index"], answers=tuple(Answer(**answer) for answer in row["answers"]))
        for row in _rows(path)
    ]


def read_scores(path: Path) -> list[Scores]:
    """The scores of a shard."""
    return [Scores(index=row["index"], scores=tuple(row["scores"])) for row in _rows(path)]


def _rows(path: Path) -> list[dict[str, Any]]:
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]
