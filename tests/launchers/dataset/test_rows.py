import json
from pathlib import Path
from typing import Any

import pytest

from estimator.errors import UserError
from launchers.dataset.rows import Conversation, parse, read

GOOD = {"instruction": "Add 1 and 2.", "output": "3"}
CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]


def write(path: Path, *lines: Any) -> Path:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("".join(text + "\n" for text in texts), encoding="utf-8")
    return path


def turns(conversation: Conversation) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in conversation.messages]


HELLO, SUM = [("user", "Hi"), ("assistant", "Hello")], [("user", "1+2="), ("assistant", "3")]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"messages": CHAT}, HELLO),
        (
            {"messages": [{"role": "developer", "content": "Be kind."}, *CHAT]},
            [("system", "Be kind."), *HELLO],
        ),
        ({"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}, HELLO),
        ({"conversations": CHAT}, HELLO),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}, CHAT[1]]}, HELLO),
        (GOOD, [("user", "Add 1 and 2."), ("assistant", "3")]),
        (GOOD | {"input": ""}, [("user", "Add 1 and 2."), ("assistant", "3")]),
        (
            {"instruction": "Add.", "input": "1 2", "response": "3", "text": "whole"},
            [("user", "Add.\n\n1 2"), ("assistant", "3")],
        ),
        (
            {"instruction": "Sum?", "context": "1 2", "response": "3"},
            [("user", "Sum?\n\n1 2"), ("assistant", "3")],
        ),
        ({"prompt": "1+2=", "completion": "3"}, SUM),
        ({"prompt": "1+2=", "response": "3"}, SUM),
    ],
)
def test_every_chat_format_is_read(row: dict[str, Any], expected: list[tuple[str, str]]) -> None:
    assert turns(parse(row)) == expected


def chat(*roles: str) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": "x"} for role in roles]}


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"text": "a"', "not JSON (Expecting ',' delimiter at column 13)"),
        ('"words"', "not a JSON object"),
        ("{}", "an empty object"),
        ("[" * 100_000, "nested too deeply"),
        ({"text": ""}, "`text` is empty"),
        ({"text": 5}, "`text` is not text but int"),
        ('{"text": "\\ud83d"}', "surrogate"),
        (chat("user"), "a chat without an assistant turn"),
        (chat("user", "user", "assistant"), "roles out of order: turn 2 is user, not assistant"),
        (chat("user", "system", "assistant"), "roles out of order: turn 2 is system"),
        (chat("user", "assistant", "user"), "the last turn must be the assistant's"),
        (chat("user", "narrator"), "messages[1] has the unknown role 'narrator'"),
        ({"messages": "Hi"}, "`messages` is not a list"),
        ({"messages": ["Hi"]}, "messages[0] is not an object"),
        ({"messages": [{"role": "user", "contents": "Hi"}]}, "has no `content` (is it `contents`?)"),
        ({"messages": [{"role": "user", "content": ""}, CHAT[1]]}, "messages[0] is empty"),
        ({"messages": [{"role": ["user"], "content": "Hi"}]}, "unknown role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0] holds an image"),
        ({"message": CHAT}, "unknown key `message` (is it `messages`?)"),
        ({"instruction": "Add."}, "`instruction` without `output` or `response`"),
        ({"instruction": "Add.", "outputs": "3"}, "(is it `outputs`?)"),
        ({"instruction": "Add.", "inputs": "1 2", "output": "3"}, "(is it `input`?)"),
        ({"prompt": "Add."}, "`prompt` without `completion` or `response`"),
        ({"question": "Why?", "answer": "So."}, "keys `question`, `answer`: none of"),
    ],
)
def test_a_bad_row_is_refused_with_its_line_and_reason(tmp_path: Path, line: Any, reason: str) -> None:
    path = write(tmp_path / "data.jsonl", GOOD, "", line, GOOD)
    with pytest.raises(UserError) as error:
        list(read(path))
    assert "data.jsonl, line 3: " in error.value.problem
    assert reason in error.value.problem
    assert "\n" not in error.value.problem


def test_invalid_rows_are_counted_and_the_first_ten_listed(tmp_path: Path) -> None:
    path = write(tmp_path / "data.jsonl", GOOD, *["{"] * 12, GOOD)
    with pytest.raises(UserError) as error:
        list(read(path))
    assert error.value.problem.endswith("12 of 14 rows cannot be used.")
    lines = error.value.advice.splitlines()
    assert [line.split(":")[0].strip() for line in lines[:10]] == [f"line {n}" for n in range(2, 12)]
    assert lines[10].strip() == "and 2 more"


def test_rows_that_are_all_bad_for_one_reason_give_one_line(tmp_path: Path) -> None:
    path = write(tmp_path / "data.jsonl", *['{"prompt": "2 + 2?", "completion": 4}'] * 12)
    with pytest.raises(UserError) as error:
        list(read(path))
    assert error.value.problem.endswith("12 of 12 rows cannot be used: `completion` is not text but int.")
    assert "\n" not in error.value.advice


def test_preference_pairs_in_a_file_of_chats_name_the_task(tmp_path: Path) -> None:
    pair = '{"prompt": "2 + 2?", "chosen": "4", "rejected": "5"}'
    for rows in ([pair], [pair] * 3):
        with pytest.raises(UserError, match="preference pair") as error:
            list(read(write(tmp_path / "data.jsonl", *rows)))
        assert "--task dpo" in error.value.advice


def test_blank_lines_a_byte_order_mark_and_mixed_shapes_are_fine(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n\r\n  \n' + json.dumps(GOOD).encode())
    conversations = list(read(path))
    assert conversations == [Conversation(text="a"), parse(GOOD)]
    assert [conversation.line for conversation in conversations] == [1, 4]


def test_a_file_that_is_not_utf_8_is_refused_with_the_reason(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes('{"text": "caf\u00e9"}'.encode("latin-1"))
    with pytest.raises(UserError, match=r"line 1: not UTF-8"):
        list(read(path))
