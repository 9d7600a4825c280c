import json
from typing import Any

import pytest

from launchers.dataset.files import BadRow
from launchers.dataset.preferences import parse as parse_pair
from launchers.dataset.rows import parse
from launchers.dataset.stored import decode, encode
from launchers.dataset.turns import Fields

USER, ASSISTANT = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
FUNCTION = {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
WITH_TOOLS = {
    "messages": [
        {"role": "user", "content": "What is 1 + 2?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
        {"role": "assistant", "content": "3."},
    ],
    "tools": [{"type": "function", "function": FUNCTION}],
}


def turns(row: dict[str, Any]) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in parse(row).messages]


def test_tool_calls_are_kept_in_the_form_that_chat_templates_expect() -> None:
    row = parse(WITH_TOOLS)
    assert json.loads(row.tools) == [{"type": "function", "function": FUNCTION}]
    _, call, answer, _ = (message.as_template() for message in row.messages)
    assert call["tool_calls"] == [
        {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
    ]
    assert answer == {"role": "tool", "content": "3", "tool_call_id": "c1"}
    assert decode(encode(row)) == row


def test_tools_may_be_a_json_string_or_use_the_older_function_keys() -> None:
    as_text = {**WITH_TOOLS, "tools": json.dumps(WITH_TOOLS["tools"])}
    assert parse(as_text) == parse(WITH_TOOLS)
    old = {
        "messages": [
            USER,
            {"role": "assistant", "function_call": {"name": "add", "arguments": "{}"}},
            {"role": "function", "name": "add", "content": "0"},
            ASSISTANT,
        ],
        "functions": [FUNCTION],
    }
    row = parse(old)
    assert json.loads(row.tools) == [{"type": "function", "function": FUNCTION}]
    assert json.loads(row.messages[1].tool_calls)[0]["function"] == {"name": "add", "arguments": {}}
    assert (row.messages[2].role, row.messages[2].name) == ("tool", "add")


def test_sharegpt_has_a_system_prompt_tools_and_calls() -> None:
    row = {
        "conversations": [
            {"from": "human", "value": "1 + 2?"},
            {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'},
            {"from": "observation", "value": "3"},
            {"from": "gpt", "value": "3."},
        ],
        "system": "Be brief.",
        "tools": json.dumps([FUNCTION]),
    }
    assert turns(row) == [
        ("system", "Be brief."), ("user", "1 + 2?"), ("assistant", ""), ("tool", "3"), ("assistant", "3."),
    ]  # fmt: skip
    assert json.loads(parse(row).messages[2].tool_calls)[0]["function"]["arguments"] == {"a": 1}


def test_alpaca_has_a_system_prompt_and_a_history() -> None:
    row = {
        "instruction": "And now?", "input": "x", "output": "C", "system": "S", "history": [["A?", "A"]],
    }  # fmt: skip
    assert turns(row) == [
        ("system", "S"), ("user", "A?"), ("assistant", "A"), ("user", "And now?\n\nx"), ("assistant", "C"),
    ]  # fmt: skip


def test_prompt_and_completion_may_be_lists_of_messages() -> None:
    assert turns({"prompt": [USER], "completion": [ASSISTANT]}) == [("user", "Hi"), ("assistant", "Hello")]
    assert turns({"prompt": [USER], "completion": "Hello"}) == [("user", "Hi"), ("assistant", "Hello")]


def test_a_list_of_turns_may_be_a_json_string_as_in_a_table() -> None:
    assert turns({"messages": json.dumps([USER, ASSISTANT])}) == [("user", "Hi"), ("assistant", "Hello")]
    assert turns({"prompt": "[1, 2] is what?", "completion": "A list."})[0] == ("user", "[1, 2] is what?")


def test_empty_cells_of_a_table_are_treated_as_missing_keys() -> None:
    empty = {"tool_calls": None, "name": None, "weight": None}
    row = {"messages": [USER | empty, ASSISTANT | empty], "tools": None, "text": None, "system": None}
    fields = Fields.of(row)
    assert parse(fields).messages == parse({"messages": [USER, ASSISTANT]}).messages
    assert fields.unused == set()


def test_a_weight_of_zero_is_kept() -> None:
    row = parse({"messages": [USER, ASSISTANT | {"weight": 0}, USER, ASSISTANT | {"weight": 1}]})
    assert [message.trained for message in row.messages] == [True, False, True, True]
    assert decode(encode(row)) == row


@pytest.mark.parametrize(
    ("row", "unused"),
    [
        ({"messages": [USER, ASSISTANT], "id": 7, "source": "web", "empty": ""}, {"id", "source"}),
        ({"messages": [USER | {"mood": "good"}, ASSISTANT]}, {"messages[].mood"}),
        ({"instruction": "a", "output": "b", "text": "ab"}, {"text"}),
        ({"text": "a", "url": "x"}, {"url"}),
        ({"messages": [USER, ASSISTANT], "instruction": "x"}, {"instruction"}),
        ({"instruction": "a", "input": "b", "context": "c", "output": "d"}, {"context"}),
        ({"messages": [USER, ASSISTANT], "tools": [FUNCTION]}, set()),
    ],
)
def test_unused_keys_of_a_row_are_recorded(row: dict[str, Any], unused: set[str]) -> None:
    fields = Fields.of(row)
    parse(fields)
    assert fields.unused == unused


def test_unused_keys_of_a_pair_are_recorded() -> None:
    fields = Fields.of({"prompt": "a", "chosen": "b", "rejected": "c", "input": "d", "score": 1})
    parse_pair(fields)
    assert fields.unused == {"input", "score"}


def calls(*messages: dict[str, Any], **overrides: Any) -> dict[str, Any]:
    return {"messages": [USER, *messages], **overrides}


CALLING = {"role": "assistant", "tool_calls": [CALL]}


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": None}, "`messages` is empty (null)"),
        (calls(ASSISTANT | {"weight": 0}), "every assistant turn has weight 0"),
        (calls(ASSISTANT | {"weight": 0.5}), "messages[1] has the weight 0.5"),
        (calls({"role": "tool", "content": "3"}, ASSISTANT), "turn 2 is tool, but no tool was called"),
        (calls(CALLING, ASSISTANT), "turn 3 is assistant, not tool"),
        (calls(ASSISTANT, USER | {"tool_calls": [CALL]}, ASSISTANT), "is not a turn of the assistant"),
        (calls(CALLING | {"tool_calls": {"a": 1}}), "`tool_calls` is not a list"),
        (calls(CALLING | {"tool_calls": [{"function": {}}]}), "a tool call without a function's name"),
        (
            calls({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{a"}}]}),
            "the arguments of f are not a JSON object",
        ),
        (calls(ASSISTANT, tools="add"), "`tools` is not a list"),
        (calls(ASSISTANT, tools=[{"type": "function"}]), "tools[0] has no function's name"),
        ({"instruction": "a", "output": "b", "history": ["c"]}, "history[0] is not a question and its"),
        ({"instruction": "a", "output": "b", "system": 5}, "`system` is not text but int"),
        ({"prompt": [USER], "completion": [USER]}, "a chat without an assistant turn"),
    ],
)  # fmt: skip
def test_an_unusable_row_is_refused_in_one_line(row: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadRow) as bad:
        parse(row)
    assert reason in str(bad.value)
    assert "\n" not in str(bad.value)
