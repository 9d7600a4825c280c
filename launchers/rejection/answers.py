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

from launchers.dataset import render
from launchers.dataset.rows import Conversation
from launchers.dataset.turns import Message

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
class Prompt:
    """One prompt: what a row of the dataset has before its last answer."""

    index: int  # its place among the prompts of the run
    text: str  # as the model sees it, special tokens included
    shown: str  # as a scoring function and a person see it: the turns' contents, without roles or tokens
    tokens: int  # of the text
    messages: tuple[Message, ...] = ()  # of a chat, without the last answer
    tools: str = ""  # that the chat may call
    prefix: str | None = None  # of plain text: the part that the model goes on with

    def with_answer(self, answer: str) -> Conversation:
        """The prompt with an answer, as a row to train on."""
        if self.prefix is not None:
            return Conversation(text=self.prefix + answer)
        turn = Message(role="assistant", content=answer)
        return Conversation(messages=(*self.messages, turn), tools=self.tools)


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """One drawn answer."""

    text: str
    tokens: int  # that were generated, the one that ends the answer included
    ended: bool  # False: cut at the longest length


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


def prompts_of(conversations: Sequence[Conversation], tokenizer: Any) -> list[Prompt]:
    """The prompts of the rows, in their order: a chat up to its last answer, a plain text's beginning."""
    prompts = []
    for index, conversation in enumerate(conversations):
        text, rest = render.prompt_of(conversation, tokenizer)
        tokens = len(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)
        if conversation.text is not None:
            prefix = conversation.text[: len(conversation.text) - len(rest)]
            prompts.append(Prompt(index=index, text=text, shown=prefix, tokens=tokens, prefix=prefix))
        else:
            before = conversation.messages[:-1]
            shown = "\n\n".join(message.content for message in before)
            tools = conversation.tools
            prompts.append(
                Prompt(index=index, text=text, shown=shown, tokens=tokens, messages=before, tools=tools)
            )
    return prompts


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


def read_prompts(path: Path) -> list[Prompt]:
    """The prompts of a file that :func:`write_rows` has made."""
    return [
        Prompt(**{**row, "messages": tuple(Message(**message) for message in row["messages"])})
        for row in _rows(path)
    ]


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
