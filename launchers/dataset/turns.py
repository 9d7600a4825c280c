"""The turns of a chat: what is taken of OpenAI's and ShareGPT's messages, and what is wrong with others."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from estimator.names import close_matches
from launchers.dataset.files import BadRow

Role = Literal["system", "user", "assistant", "tool"]
_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "function_call": "assistant",  # ShareGPT: its text is the call
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}
_CALLS = ("tool_calls", "function_call")
_USED = {"role", "content", "from", "value", "weight", "name", "tool_call_id", *_CALLS}
_EMPTY: tuple[Any, ...] = (None, "", [], {})


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """One turn. A tool's calls are JSON, as chat templates take them: a list of functions with arguments."""

    role: Role
    content: str
    trained: bool = True  # of an assistant's turn: whether it is learnt (OpenAI's ``weight``)
    tool_calls: str = ""
    name: str = ""  # of the tool that answers
    tool_call_id: str = ""

    def as_template(self) -> dict[str, Any]:
        """What a chat template is given."""
        values: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.tool_calls:
            values["tool_calls"] = json.loads(self.tool_calls)
        if self.name:
            values["name"] = self.name
        if self.tool_call_id:
            values["tool_call_id"] = self.tool_call_id
        return values


class Fields(dict[str, Any]):
    """A decoded row, which knows what of it nobody has asked for."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self._used: set[str] = set()
        self._unused: set[str] = set()

    @classmethod
    def of(cls, row: Any) -> Fields:
        """A decoded row as the object that it has to be; raises BadRow."""
        if isinstance(row, Fields):
            return row
        if isinstance(row, list):
            raise BadRow("a JSON list, not an object; each row is an object")
        if not isinstance(row, dict):
            raise BadRow(f"not a JSON object but {json.dumps(row)[:40]}")
        return cls(row)

    def __getitem__(self, name: str) -> Any:
        self._used.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        """As of any dict."""
        self._used.add(name)
        return super().get(name, default)

    def has(self, name: str) -> bool:
        """Whether there is such a value, which does not count as asking for it."""
        return super().get(name) is not None

    def first(self, names: Sequence[str]) -> str | None:
        """The first of the names that has a value."""
        return next((name for name in names if self.has(name)), None)

    def leave_out(self, name: str) -> None:
        """Note a key, of whatever depth, that is not used."""
        self._unused.add(name)

    @property
    def unused(self) -> set[str]:
        """The keys with a value that nobody has asked for."""
        top = {name for name, value in self.items() if name not in self._used and value not in _EMPTY}
        return top | self._unused


def chat(values: Any, name: str, row: Fields, *, ends_with: Role = "assistant") -> tuple[Message, ...]:
    """The turns of a list of objects, in order; raises BadRow. ``name``: what the row calls the list."""
    values = decoded(values)
    if not isinstance(values, list):
        raise BadRow(f"`{name}` is not a list")
    keys = keys_of(values)
    messages = [_turn(value, f"{name}[{place}]", keys, row) for place, value in enumerate(values)]
    if messages and messages[0].role != "system" and name in ("messages", "conversations"):
        messages = [*system_of(row), *messages]
    _check_order(messages, ends_with)
    if ends_with == "assistant" and not any(m.trained for m in messages if m.role == "assistant"):
        raise BadRow("every assistant turn has weight 0: there is nothing to learn from it")
    return tuple(messages)


def keys_of(messages: list[Any]) -> tuple[str, str]:
    """What a list of turns calls role and content: OpenAI's names, or ShareGPT's."""
    first = messages[0] if messages else None
    return ("from", "value") if isinstance(first, dict) and "role" not in first else ("role", "content")


def ends_with_question(values: Any) -> bool:
    """Whether the last turn of a list is one that the assistant is to answer."""
    values = decoded(values)
    last = values[-1] if isinstance(values, list) and values else None
    role = last.get(keys_of(values)[0]) if isinstance(last, dict) else None
    return isinstance(role, str) and _ROLES.get(role) in ("user", "tool")


def system_of(row: Fields) -> tuple[Message, ...]:
    """The turn that a row's ``system`` is."""
    if not row.get("system"):
        return ()
    return (Message(role="system", content=text_of(row["system"], "`system`")),)


def decoded(value: Any) -> Any:
    """A list or an object that is written as JSON in a text, as in a column of a table; else as it is."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(value)
        except (json.JSONDecodeError, RecursionError):
            return value
    return value


def _turn(value: Any, where: str, keys: tuple[str, str], row: Fields) -> Message:
    if not isinstance(value, dict):
        raise BadRow(f"{where} is not an object")
    role_key, content_key = keys
    calls = next((key for key in _CALLS if value.get(key) not in _EMPTY), None)
    for key in keys:
        if key not in value and not (key == content_key and calls):
            near = close_matches(key, [other for other in value if other not in _USED])
            raise BadRow(f"{where} has no `{key}`" + (f"; `{near[0]}` should be `{key}`?" if near else ""))
    said = value[role_key]
    role = _ROLES.get(said) if isinstance(said, str) else None
    if role is None:
        raise BadRow(f"{where} has the unknown role {said!r}; use system, user, assistant or tool")
    for key in value.keys() - _USED:
        if value[key] not in _EMPTY:
            row.leave_out(f"{where.partition('[')[0]}[].{key}")
    content = joined_parts(value.get(content_key), where)
    if said == "function_call":
        return Message(role=role, content="", tool_calls=_calls([decoded(content)], where))
    if calls and role != "assistant":
        raise BadRow(f"{where} has `{calls}`, but is no turn of the assistant")
    if calls:
        found = decoded(value[calls])
        return Message(
            role=role,
            content="" if content in _EMPTY else text_of(content, where),
            trained=_trained(value, where),
            tool_calls=_calls(found if calls == "tool_calls" else [found], where),
        )
    if role != "tool":
        return Message(role=role, content=text_of(content, where), trained=_trained(value, where))
    answer = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
    name, call = (str(value.get(key) or "") for key in ("name", "tool_call_id"))
    return Message(role=role, content=answer, name=name, tool_call_id=call)  # its answer may be empty


def _trained(value: dict[str, Any], where: str) -> bool:
    weight = value.get("weight")
    if weight is not None and (isinstance(weight, str) or weight not in (0, 1)):
        raise BadRow(f"{where} has the weight {json.dumps(weight)[:20]}; a turn's is 0 (not learnt) or 1")
    return weight is None or bool(weight)


def _calls(calls: Any, where: str) -> str:
    """Calls of tools as chat templates take them, as JSON; raises BadRow."""
    if not isinstance(calls, list):
        raise BadRow(f"{where}: `tool_calls` is not a list")
    found = []
    for call in calls:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadRow(f"{where} has a tool call without a function's name")
        arguments = decoded(function.get("arguments") or {})
        if not isinstance(arguments, dict):
            raise BadRow(f"{where}: the arguments of {function['name']} are not a JSON object")
        values: dict[str, Any] = {"type": "function"}
        if call.get("id"):
            values["id"] = call["id"]
        values["function"] = {"name": function["name"], "arguments": without_nulls(arguments)}
        found.append(values)
    return json.dumps(found, ensure_ascii=False)


def tools_of(row: Fields) -> str:
    """The tools that a chat may call, as JSON of the list that chat templates take; empty: none."""
    name = row.first(("tools", "functions"))
    tools = decoded(row[name]) if name else None
    if tools in _EMPTY:
        return ""
    if not isinstance(tools, list):
        raise BadRow(f"`{name}` is not a list")
    found = []
    for place, tool in enumerate(tools):
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadRow(f"{name}[{place}] has no function's name")
        found.append({"type": "function", "function": without_nulls(function)})
    return json.dumps(found, ensure_ascii=False)


def without_nulls(value: Any) -> Any:
    """A value without keys that have none: tables give every object the keys of all others."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def _check_order(messages: Sequence[Message], ends_with: Role) -> None:
    turns = [message.role for message in messages]
    if ends_with not in turns:
        lesson = ": there is nothing to learn from it" if ends_with == "assistant" else ""
        raise BadRow(f"a chat without {_article(ends_with)} turn{lesson}")
    first = 1 if turns[0] == "system" else 0
    expected: tuple[Role, ...] = ("user",)
    for position, message in enumerate(messages[first:], start=first + 1):
        if message.role not in expected:
            if message.role == "tool":
                raise BadRow(f"roles out of order: turn {position} is tool, but no tool was called")
            raise BadRow(f"roles out of order: turn {position} is {message.role}, not {expected[0]}")
        if message.role == "assistant":
            expected = ("tool",) if message.tool_calls else ("user",)
        else:
            expected = ("assistant",) if message.role == "user" else ("assistant", "tool")
    if turns[-1] != ends_with and not (ends_with == "user" and turns[-1] == "tool"):
        raise BadRow(f"roles out of order: the last turn must be the {ends_with}'s")


def _article(role: Role) -> str:
    return f"an {role}" if role == "assistant" else f"a {role}"


def joined_parts(content: Any, where: str) -> Any:
    """OpenAI's list of content parts as one text; anything else as it is."""
    if not isinstance(content, list):
        return content
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else part
        if not isinstance(text, str):
            raise BadRow(f"{where} holds a part that is not text")
        texts.append(text)
    return "".join(texts)


def text_of(value: Any, where: str) -> str:
    """A text that is not empty; raises BadRow. ``where``: what the row calls it."""
    if not isinstance(value, str):
        empty = value is None
        raise BadRow(f"{where} is empty" if empty else f"{where} is not text but {type(value).__name__}")
    if not value.strip():
        raise BadRow(f"{where} is empty")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise BadRow(f"{where} holds half of a surrogate pair (a broken \\ud... escape)") from None
    return value
