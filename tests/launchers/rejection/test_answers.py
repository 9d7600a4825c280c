"""Prompts from rows, shards of prompts, and files of answers."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from launchers.dataset import render
from launchers.dataset.prompts import Prompt, prompts_of, read_prompts
from launchers.dataset.rows import Conversation
from launchers.dataset.turns import Message
from launchers.models import tiny_llama
from launchers.rejection import answers as rows
from launchers.rejection.answers import Answer, Answers, BatchLimit, Scores
from launchers.settings import Settings

CHAT = Conversation(
    messages=(
        Message(role="system", content="Be short."),
        Message(role="user", content="What is 1 + 1?"),
        Message(role="assistant", content="2"),
    )
)
LONG = Conversation(text="word " * 1000)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> list[Prompt]:
    folder = tmp_path_factory.mktemp("model")
    tiny_llama.make(folder)
    tokenizer = render.load_tokenizer(folder, Settings())
    return list(prompts_of([CHAT, Conversation(text="one two three four"), LONG], tokenizer))


def test_a_chat_is_a_prompt_up_to_its_last_answer(prompts: list[Prompt]) -> None:
    chat = prompts[0]
    assert chat.text.endswith("<|start_header_id|>assistant<|end_header_id|>\n\n")
    assert "What is 1 + 1?" in chat.text
    assert chat.shown == "Be short.\n\nWhat is 1 + 1?"
    answered = chat.with_answer("two")
    assert answered.messages == (*CHAT.messages[:2], Message(role="assistant", content="two"))


def test_the_beginning_of_a_plain_text_is_used_as_a_prompt(prompts: list[Prompt]) -> None:
    text = prompts[1]
    assert (text.prefix, text.with_answer(" and so on").text) == ("one two", "one two and so on")
    long = prompts[2]
    assert long.prefix == "word " * 39 + "word"
    assert long.text.endswith(long.prefix)


LIMIT = BatchLimit(sequences=64, tokens=16384)


def prompts_of_lengths(lengths: Iterable[int]) -> list[Prompt]:
    return [Prompt(index=index, text="", shown="", tokens=tokens) for index, tokens in enumerate(lengths)]


def test_shards_contain_every_prompt_once_with_the_longest_first() -> None:
    prompts = prompts_of_lengths(index % 7 for index in range(50))
    shards = rows.shards_of(prompts, 4, limit=LIMIT, new_tokens=8)
    assert [len(shard) for shard in shards] == [16, 16, 16, 2]
    drawn_prompts = [prompt for shard in shards for prompt in shard]
    assert sorted(prompt.index for prompt in drawn_prompts) == list(range(50))
    assert [prompt.tokens for prompt in drawn_prompts] == sorted(
        (index % 7 for index in range(50)), reverse=True
    )
    alone = rows.shards_of(prompts[:2], 500, limit=LIMIT, new_tokens=8)
    assert [len(shard) for shard in alone] == [1, 1]


def test_a_shard_has_at_least_the_prompts_of_one_batch() -> None:
    large = BatchLimit(sequences=256, tokens=100_000)
    short, long = prompts_of_lengths([100] * 200), prompts_of_lengths([3000] * 200)
    assert [len(shard) for shard in rows.shards_of(short, 4, limit=large, new_tokens=100)] == [64, 64, 64, 8]
    # A batch holds 32 answers of 3,100 tokens; a shard no fewer than 64
    assert large.prompts(3100, 4) == 8
    assert len(rows.shards_of(long, 4, limit=large, new_tokens=100)[0]) == 16
    assert large.prompts(200_000, 4) == 1, "one prompt's answers are tried in any case"


def test_answers_and_scores_are_read_back_from_their_files(tmp_path: Path, prompts: list[Prompt]) -> None:
    answers = [Answers(index=3, answers=(Answer(text="a\nb", tokens=2, ended=True),))]
    scores = [Scores(index=3, scores=(0.5, -1.0))]
    for name, values in (("p", prompts), ("a", answers), ("s", scores)):
        rows.write_rows(tmp_path / name, values)
    assert read_prompts(tmp_path / "p") == prompts
    assert (rows.read_answers(tmp_path / "a"), rows.read_scores(tmp_path / "s")) == (answers, scores)
    assert {path.name for path in tmp_path.iterdir()} == {"p", "a", "s"}, "no half-written file is left"
