"""Turns of a chat: parsing of messages in OpenAI's and ShareGPT's formats, and errors for invalid ones."""

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
    "function_call": "assistant",  # ShareGPT: the content is the tool call
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}
_CALLS = ("tool_calls", "function_call")
_REASONING = ("reasoning_content", "reasoning", "thinking")
_USED = {"role", "content", "from", "value", "weight", "name", "tool_call_id", *_CALLS, *_REASONING}
_EMPTY: tuple[Any, ...] = (None, "", [], {})
IMAGE_PARTS = ("image_url", "image", "input_image")  # types of content parts
IMAGE_KEYS = ("image_url", "image", "url", "path", "bytes", "base64")  # keys of a part's image
IMAGE = "\ufffc"  # placeholder of an image in a turn: Unicode's object replacement character


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """One turn. ``tool_calls``: list of functions with arguments, as JSON in the format of chat templates."""

    role: Role
    content: str  # with the placeholder :data:`IMAGE` for each image
    trained: bool = True  # for assistant turns: whether the turn counts in the loss (OpenAI's ``weight``)
    tool_calls: str = ""
    name: str = ""  # name of the responding tool
    tool_call_id: str = ""
    reasoning: str = ""  # reasoning before the answer, unless it is part of the content

    def as_template(self) -> dict[str, Any]:
        """Convert to the format that chat templates expect."""
        values: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.tool_calls:
            values["tool_calls"] = json.loads(self.tool_calls)
        if self.reasoning:
            values["reasoning_content"] = self.reasoning
        if self.name:
            values["name"] = self.name
        if self.tool_call_id:
            values["tool_call_id"] = self.tool_call_id
        return values


class Fields(dict[str, Any]):
    """Decoded row that records which of its keys were read, to report the others as unused."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.parts: list[Any] | None = None  # receives references of images; None: images are not read
        self._used: set[str] = set()
        self._unused: set[str] = set()

    @classmethod
    def of(cls, row: Any) -> Fields:
        """Convert a decoded row; raises BadRow unless it is an object."""
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
        """Return a value like ``dict.get``."""
        self._used.add(name)
        return super().get(name, default)

    def has(self, name: str) -> bool:
        """Whether the key has a value other than None; does not record it as read."""
        return super().get(name) is not None

    def first(self, names: Sequence[str]) -> str | None:
        """Return the first of the names that has a value."""
        return next((name for name in names if self.has(name)), None)

    def mark_unused(self, name: str) -> None:
        """Record a key of a nested object as unused."""
        self._unused.add(name)

    @property
    def unused(self) -> set[str]:
        """Keys with a value that were not read."""
        top = {name for name, value in self.items() if name not in self._used and value not in _EMPTY}
        return top | self._unused


def chat(values: Any, name: str, row: Fields, *, ends_with: Role = "assistant") -> tuple[Message, ...]:
    """Parse a list of messages; raises BadRow. ``name``: the list's key in ``row``, for error messages.

    The row's ``system`` is put first if the list has no system turn. ``ends_with``: required last role.
    """
    values = decode_json(values)
    if not isinstance(values, list):
        raise BadRow(f"`{name}` is not a list")
    keys = role_and_content_keys(values)
    messages = [_parse_turn(value, f"{name}[{index}]", keys, row) for index, value in enumerate(values)]
    if messages and messages[0].role != "system" and name in ("messages", "conversations"):
        messages = [*system_of(row), *messages]
    _check_order(messages, ends_with)
    if ends_with == "assistant" and not any(m.trained for m in messages if m.role == "assistant"):
        raise BadRow("every assistant turn has weight 0: there is nothing to learn from it")
    return tuple(messages)


def role_and_content_keys(messages: list[Any]) -> tuple[str, str]:
    """Return the keys of role and content in a list of messages: OpenAI's or ShareGPT's."""
    first = messages[0] if messages else None
    return ("from", "value") if isinstance(first, dict) and "role" not in first else ("role", "content")


def ends_with_question(values: Any) -> bool:
    """Whether a list of messages ends with a turn that the assistant must answer."""
    values = decode_json(values)
    last = values[-1] if isinstance(values, list) and values else None
    role = last.get(role_and_content_keys(values)[0]) if isinstance(last, dict) else None
    return isinstance(role, str) and _ROLES.get(role) in ("user", "tool")


def system_of(row: Fields) -> tuple[Message, ...]:
    """Return the system turn of a row with ``system``; an empty tuple without."""
    if not row.get("system"):
        return ()
    return (Message(role="system", content=text_of(row["system"], "`system`")),)


def decode_json(value: Any) -> Any:
    """Decode a list or object that is stored as JSON text, as in CSV; return other values unchanged."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(value)
        except (json.JSONDecodeError, RecursionError):
            return value
    return value


def _parse_turn(value: Any, location: str, keys: tuple[str, str], row: Fields) -> Message:
    """Parse one message; raises BadRow. ``keys``: keys of role and content. ``location``: for errors."""
    if not isinstance(value, dict):
        raise BadRow(f"{location} is not an object")
    role_key, content_key = keys
    calls = next((key for key in _CALLS if value.get(key) not in _EMPTY), None)
    for key in keys:
        if key not in value and not (key == content_key and calls):
            similar = close_matches(key, [unused for unused in value if unused not in _USED])
            raise BadRow(f"{location} has no `{key}`" + (f" (is it `{similar[0]}`?)" if similar else ""))
    role_name = value[role_key]
    role = _ROLES.get(role_name) if isinstance(role_name, str) else None
    if role is None:
        raise BadRow(f"{location} has the unknown role {role_name!r}; use system, user, assistant or tool")
    for key in value.keys() - _USED:
        if value[key] not in _EMPTY:
            row.mark_unused(f"{location.partition('[')[0]}[].{key}")
    content = join_parts(value.get(content_key), location, row.parts)
    if role_name == "function_call":
        return Message(role=role, content="", tool_calls=_convert_calls([decode_json(content)], location))
    reasoning = next((str(value[key]) for key in _REASONING if value.get(key) not in _EMPTY), "")
    if calls and role != "assistant":
        raise BadRow(f"{location} has `{calls}`, but is not a turn of the assistant")
    if calls:
        raw_calls = decode_json(value[calls])
        return Message(
            role=role,
            content="" if content in _EMPTY else text_of(content, location),
            trained=_trained(value, location),
            tool_calls=_convert_calls(raw_calls if calls == "tool_calls" else [raw_calls], location),
            reasoning=reasoning,
        )
    if role != "tool":
        return Message(
            role=role,
            content=text_of(content, location),
            trained=_trained(value, location),
            reasoning=reasoning if role == "assistant" else "",
        )
    answer = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
    name, call = (str(value.get(key) or "") for key in ("name", "tool_call_id"))
    return Message(role=role, content=answer, name=name, tool_call_id=call)  # a tool's response may be empty


def _trained(value: dict[str, Any], location: str) -> bool:
    """Whether a turn counts in the loss, by its ``weight``; raises BadRow for a value other than 0 or 1."""
    weight = value.get("weight")
    if weight is not None and (isinstance(weight, str) or weight not in (0, 1)):
        raise BadRow(f"{location} has the weight {json.dumps(weight)[:20]}; a turn's is 0 (not trained) or 1")
    return weight is None or bool(weight)


def _convert_calls(calls: Any, location: str) -> str:
    """Convert tool calls to the format of chat templates, as JSON; raises BadRow."""
    if not isinstance(calls, list):
        raise BadRow(f"{location}: `tool_calls` is not a list")
    converted = []
    for call in calls:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadRow(f"{location} has a tool call without a function's name")
        arguments = decode_json(function.get("arguments") or {})
        if not isinstance(arguments, dict):
            raise BadRow(f"{location}: the arguments of {function['name']} are not a JSON object")
        values: dict[str, Any] = {"type": "function"}
        if call.get("id"):
            values["id"] = call["id"]
        values["function"] = {"name": function["name"], "arguments": remove_nulls(arguments)}
        converted.append(values)
    return json.dumps(converted, ensure_ascii=False)


def tools_of(row: Fields) -> str:
    """Convert the tools available in a chat to the format of chat templates, as JSON; empty without tools."""
    name = row.first(("tools", "functions"))
    tools = decode_json(row[name]) if name else None
    if tools in _EMPTY:
        return ""
    if not isinstance(tools, list):
        raise BadRow(f"`{name}` is not a list")
    converted = []
    for index, tool in enumerate(tools):
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadRow(f"{name}[{index}] has no function's name")
        converted.append({"type": "function", "function": remove_nulls(function)})
    return json.dumps(converted, ensure_ascii=False)


def remove_nulls(value: Any) -> Any:
    """Remove keys without a value at any depth: in tables, every object has the keys of all others."""
    if isinstance(value, dict):
        return {key: remove_nulls(item) for key, item in value.items() if item is not None}
    return [remove_nulls(item) for item in value] if isinstance(value, list) else value


def _check_order(messages: Sequence[Message], ends_with: Role) -> None:
    """Raise BadRow unless the roles alternate as chat templates expect, and end with ``ends_with``."""
    roles = [message.role for message in messages]
    if ends_with not in roles:
        if ends_with == "assistant":
            raise BadRow("a chat without an assistant turn: there is nothing to learn from it")
        raise BadRow(f"a chat without a {ends_with} turn")
    first = 1 if roles[0] == "system" else 0
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
    if roles[-1] != ends_with and not (ends_with == "user" and roles[-1] == "tool"):
        raise BadRow(f"roles out of order: the last turn must be the {ends_with}'s")


def join_parts(content: Any, location: str, images: list[Any] | None = None) -> Any:
    """Join a list of content parts (OpenAI's format) to one text; return other values unchanged.

    ``images``: receives the references of image parts, which become :data:`IMAGE` in the text; None: image
    parts raise BadRow.
    """
    if not isinstance(content, list):
        return content
    texts = []
    for part in content:
        if isinstance(part, dict) and part.get("type") in IMAGE_PARTS:
            if images is None:
                raise BadRow(f"{location} holds an image, which is read only if `vision` is set")
            images.append(next(({k: part[k]} for k in IMAGE_KEYS if part.get(k) not in _EMPTY), None))
            texts.append(IMAGE)
            continue
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else part
        if not isinstance(text, str):
            raise BadRow(f"{location} holds a part that is not text")
        texts.append(text)
    return "".join(texts)


def text_of(value: Any, location: str) -> str:
    """Check that a value is non-empty text, and return it; raises BadRow. ``location``: for errors."""
    if not isinstance(value, str):
        empty = value is None
        raise BadRow(
            f"{location} is empty" if empty else f"{location} is not text but {type(value).__name__}"
        )
    if not value.strip():
        raise BadRow(f"{location} is empty")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise BadRow(f"{location} holds half of a surrogate pair (a broken \\ud... escape)") from None
    return value
