"""Preference data: pairs of a better and a worse answer, and judged answers.

Supported row formats, which may be mixed:

* TRL: ``{"prompt", "chosen", "rejected"}``, each a text or a list of messages; without ``prompt``,
  ``chosen`` and ``rejected`` are complete chats (messages, or texts of ``Human:`` and ``Assistant:`` turns),
  which differ in their last turn
* LLaMA-Factory: ``{"instruction", "input", "system", "history", "chosen", "rejected"}`` (``input``,
  ``system`` and ``history`` may be missing), or ``{"conversations": [...], "chosen": {"from", "value"},
  "rejected": {...}}``, or the older ``{"instruction", "output": [better, worse]}``
* axolotl: ``{"messages": [...], "chosen": {"role", "content"}, "rejected": {...}}``, or ``{"instruction",
  "chosen_response", "rejected_response"}``, or ``{"prompt", "answers": [{"answer", "rank"}, ...]}``, of which
  the best and the worst rank are used

Judged answers, for KTO, have ``label`` or ``kto_tag`` (true or false) and one of: ``prompt`` and
``completion``; ``messages`` or ``conversations`` that end with the answer; ``instruction`` (and ``input``,
``system``, ``history``) and ``output``.

Other keys (an id, a score) are ignored; the number of rows that have them is reported.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from estimator.errors import UserError
from launchers.dataset.columns import UnknownColumns
from launchers.dataset.files import BadRow
from launchers.dataset.picture import Picture
from launchers.dataset.rows import NO_COLUMNS, Conversation, decode_turns, history_of, read_as
from launchers.dataset.turns import (
    Fields,
    Message,
    chat,
    decode_json,
    join_parts,
    system_of,
    text_of,
    tools_of,
)

_TURN = re.compile(r"\n\n(Human|Assistant):")  # as in Anthropic's HH-RLHF dataset
_TRUTHS = {"true": True, "false": False}  # booleans as CSV files contain them
_ANSWERS = (("chosen", "rejected"), ("chosen_response", "rejected_response"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """Chosen and rejected conversation, which differ only in their last turn, the assistant's."""

    chosen: Conversation
    rejected: Conversation

    @property
    def line(self) -> int:
        """Line of the source file; 0: none."""
        return self.chosen.line

    @property
    def source(self) -> int:
        """Index of the row's dataset in the run."""
        return self.chosen.source

    def with_source(self, source: int) -> Pair:
        """Return a copy with ``source`` as the index of its dataset."""
        return replace(self, chosen=replace(self.chosen, source=source))


@dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    """Conversation whose last turn, the assistant's, was judged good or bad."""

    conversation: Conversation
    desirable: bool

    @property
    def line(self) -> int:
        """Line of the source file; 0: none."""
        return self.conversation.line

    @property
    def source(self) -> int:
        """Index of the row's dataset in the run."""
        return self.conversation.source

    def with_source(self, source: int) -> Judged:
        """Return a copy with ``source`` as the index of its dataset."""
        return replace(self, conversation=replace(self.conversation, source=source))


Sample = Conversation | Pair | Judged | Picture  # one row of a dataset, of any task


def conversation_of(sample: Sample) -> Conversation:
    """Return the row's conversation, of a pair the chosen one; raises TypeError for a picture."""
    if isinstance(sample, Picture):
        raise TypeError("a picture has no conversation")
    if isinstance(sample, Pair):
        return sample.chosen
    return sample.conversation if isinstance(sample, Judged) else sample


def read_judged(path: Path, columns: Mapping[str, str] = NO_COLUMNS) -> Iterator[Judged]:
    """Read and check a file of judged answers (:func:`launchers.dataset.rows.read_as`).

    Also raises UserError if all answers are good, or all are bad.
    """
    labels: set[bool] = set()
    for row in read_as(path, parse_judged, columns):
        labels.add(row.desirable)
        yield row
    if len(labels) == 1:
        value = "true" if labels.pop() else "false"
        raise UserError(f"Dataset {path}: every `label` is {value}.", "KTO needs both good and bad answers.")


def parse_judged(row: Any, line: int = 0) -> Judged:
    """Parse one decoded row as a judged answer; raises BadRow."""
    row = Fields.of(row)
    name = next((key for key in ("label", "kto_tag") if key in row), None)
    if name is None:
        reason = "no `label` (true or false), which says whether the answer is a good one"
        raise UnknownColumns(reason, row, ["label"])
    desirable = _TRUTHS.get(row[name].lower(), row[name]) if isinstance(row[name], str) else row[name]
    if not isinstance(desirable, bool):
        raise BadRow(f"`{name}` is {json.dumps(row[name])[:40]}, not true or false")
    answer = row.first(("completion", "output", "response"))
    if answer is not None:
        messages = (*_parse_prompt(row), _parse_answer(row[answer], answer))
    else:
        chat_name = row.first(("messages", "conversations"))
        if chat_name is None:
            raise BadRow(f"`{name}` without an answer: no `completion`, `output` or `messages`")
        messages = chat(row[chat_name], chat_name, row)
    conversation = Conversation(messages=messages, tools=tools_of(row), line=line)
    return Judged(conversation=conversation, desirable=desirable)


def read(path: Path, columns: Mapping[str, str] = NO_COLUMNS) -> Iterator[Pair]:
    """Read and check a file of pairs (:func:`launchers.dataset.rows.read_as`)."""
    return read_as(path, parse, columns)


def parse(row: Any, line: int = 0) -> Pair:
    """Parse one decoded row as a Pair; raises BadRow."""
    row = Fields.of(row)
    chosen_turns, rejected_turns = map(decode_turns, _chosen_and_rejected(row))
    if _includes_prompt(row, chosen_turns) or _includes_prompt(row, rejected_turns):
        chosen = _parse_chat(chosen_turns, "chosen", row)
        rejected = _parse_chat(rejected_turns, "rejected", row)
        if chosen[:-1] != rejected[:-1]:
            raise BadRow(
                "`chosen` and `rejected` differ before their last turn: they do not answer the same prompt"
            )
        _check_prompt(row, chosen[:-1])
    else:
        prompt = _parse_prompt(row)
        chosen = (*prompt, _parse_answer(chosen_turns, "chosen"))
        rejected = (*prompt, _parse_answer(rejected_turns, "rejected"))
    if chosen == rejected:
        raise BadRow("`chosen` and `rejected` are equal: there is nothing to prefer")
    tools = tools_of(row)
    return Pair(
        chosen=Conversation(messages=chosen, tools=tools, line=line),
        rejected=Conversation(messages=rejected, tools=tools, line=line),
    )


def judged_from_pairs(pairs: Iterable[Pair]) -> Iterator[Judged]:
    """Convert each pair to two judged answers: the chosen one is good, the rejected one bad."""
    return (
        Judged(conversation=conversation, desirable=conversation is pair.chosen)
        for pair in pairs
        for conversation in (pair.chosen, pair.rejected)
    )


def from_conversations(conversations: Iterable[Conversation]) -> Iterator[Pair]:
    """Make pairs from chats; the rejected answer is the chosen one in capital letters."""
    for chosen in conversations:
        if not chosen.messages:
            continue
        *prompt, chosen_answer = chosen.messages
        rejected_answer = Message(role="assistant", content=chosen_answer.content.upper())
        if rejected_answer != chosen_answer:
            rejected = Conversation(messages=(*prompt, rejected_answer), line=chosen.line)
            yield Pair(chosen=chosen, rejected=rejected)


def _chosen_and_rejected(row: Fields) -> tuple[Any, Any]:
    """Return the row's chosen and rejected answer, not yet parsed; raises BadRow."""
    for chosen_key, rejected_key in _ANSWERS:
        if chosen_key in row or rejected_key in row:
            missing = next(
                (key for key in (chosen_key, rejected_key) if row.get(key) in (None, "", "[]", [])), None
            )
            if missing:
                raise BadRow(f"no `{missing}` answer: a pair has `{chosen_key}` and `{rejected_key}`")
            return row[chosen_key], row[rejected_key]
    ranked = decode_json(row["answers"]) if row.has("answers") else None
    if isinstance(ranked, list):
        return _by_rank(ranked)
    output = decode_json(row["output"]) if row.has("output") else None
    if isinstance(output, list):
        if len(output) != 2:
            raise BadRow(f"`output` holds {len(output)} answers, not the better and the worse")
        return output[0], output[1]
    keys = ", ".join(f"`{key}`" for key in list(row)[:6]) or "nothing"
    reason = f"no `chosen` and `rejected`, but {keys}: preferences are learned from pairs"
    raise UnknownColumns(reason, row, ["chosen", "rejected"])


def _by_rank(answers: list[Any]) -> tuple[Any, Any]:
    """Return the answers with the best and the worst rank."""
    for position, answer in enumerate(answers):
        if not (
            isinstance(answer, dict) and "answer" in answer and isinstance(answer.get("rank"), int | float)
        ):
            raise BadRow(f"answers[{position}] has no `answer` and `rank`")
    ranked = sorted(answers, key=lambda answer: answer["rank"])
    if not ranked or ranked[0]["rank"] == ranked[-1]["rank"]:
        raise BadRow("`answers` has no two of different `rank`")
    return ranked[0]["answer"], ranked[-1]["answer"]


def _includes_prompt(row: Fields, answer: Any) -> bool:
    """Whether an answer is a complete chat that includes its prompt."""
    if isinstance(answer, list):
        return any(_role(message) in ("user", "human") for message in answer)
    return isinstance(answer, str) and not _has_prompt(row) and len(_TURN.findall(answer)) > 1


def _role(message: Any) -> Any:
    return message.get("role", message.get("from")) if isinstance(message, dict) else None


def _has_prompt(row: Fields) -> bool:
    return row.first(("prompt", "instruction", "messages", "conversations")) is not None


def _parse_chat(answer: Any, name: str, row: Fields) -> tuple[Message, ...]:
    """Parse a complete chat: a list of messages, or a text with ``Human:`` and ``Assistant:`` turns."""
    if isinstance(answer, str):
        preamble, *turns = _TURN.split(answer)
        if preamble.strip() or not turns:
            raise BadRow(f"`{name}` is a text without a prompt: give `prompt`, or whole chats")
        names = {"Human": "user", "Assistant": "assistant"}
        turns_by_speaker = zip(turns[::2], turns[1::2], strict=True)
        answer = [{"role": names[speaker], "content": text.strip()} for speaker, text in turns_by_speaker]
    return chat(answer, name, row)


def _check_prompt(row: Fields, messages: tuple[Message, ...]) -> None:
    """Raise BadRow if the row has a ``prompt`` that is not the beginning of its complete chats."""
    if not _has_prompt(row):
        return
    prompt = _parse_prompt(row)
    if prompt not in (messages, messages[-len(prompt) :]):
        raise BadRow("the complete chats do not begin with `prompt`")


def _parse_prompt(row: Fields) -> tuple[Message, ...]:
    """Parse the turns before the answer; the last one is the user's."""
    name = row.first(("messages", "conversations", "prompt"))
    value = decode_turns(row[name]) if name else None
    if name and (name != "prompt" or isinstance(value, list)):
        return chat(value, name, row, ends_with="user")
    if name:
        return (*system_of(row), Message(role="user", content=text_of(value, "`prompt`")))
    if not row.has("instruction"):
        reason = "`chosen` and `rejected` without a prompt: give `prompt`, or whole chats"
        raise UnknownColumns(reason, row, ["prompt"])
    question = text_of(row["instruction"], "`instruction`")
    if row.get("input"):
        question += "\n\n" + text_of(row["input"], "`input`")
    return (*system_of(row), *history_of(row), Message(role="user", content=question))


def _parse_answer(answer: Any, name: str) -> Message:
    """Parse an answer without prompt: a text, a message, or a list of one message."""
    if isinstance(answer, list):
        if len(answer) != 1:
            raise BadRow(f"`{name}` is {len(answer)} turns; an answer is one, or a whole chat")
        answer = answer[0]
    if isinstance(answer, dict):
        if _role(answer) not in ("assistant", "gpt", "model"):
            raise BadRow(f"`{name}` is a turn of {_role(answer)!r}, not of the assistant")
        answer = join_parts(answer.get("content", answer.get("value")), f"`{name}`")
    return Message(role="assistant", content=text_of(answer, f"`{name}`"))
