"""Character spans of the assistant's turns in a rendered chat.

If the template marks the assistant's text with ``{% generation %}``, these marks are the spans. Otherwise the
span of a turn is the text that the template appends for it after the generation prompt. A template may render
an earlier turn shorter than the last one, for example without its reasoning.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from launchers.dataset.turns import IMAGE

Span = tuple[int, int]
Messages = Sequence[dict[str, Any]]
Render = Callable[[Messages, bool], str]  # messages, and whether to add the generation prompt
RenderMarked = Callable[[Messages], list[Span]]  # spans that the template marks

_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")  # the same pattern as in transformers


def has_marks(template: str) -> bool:
    """Whether a chat template marks the assistant's text with ``{% generation %}``."""
    return _MARK.search(template) is not None


def marked_spans(messages: Messages, turns: Sequence[int], render: RenderMarked) -> list[Span]:
    """Return the non-empty spans that the template marks in the turns with these indices.

    A turn's spans are found by counting: the spans of the chat before the turn, and of the chat including it.
    """
    spans = render(messages)
    assistant_turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if list(turns) == assistant_turns:
        return [span for span in spans if span[0] < span[1]]
    selected: list[Span] = []
    for index in turns:
        selected += spans[len(render(messages[:index])) : len(render(messages[: index + 1]))]
    return [span for span in selected if span[0] < span[1]]


def turn_span(
    messages: Messages, index: int, text: str, render: Render, special_tokens: Sequence[str]
) -> Span | None:
    """Find the span of one assistant turn in ``text``, the rendered chat; None if it cannot be found."""
    start = _start(messages, index, text, render)
    if start is None:
        return None
    if index == len(messages) - 1:
        return start, len(text)
    rendered = render(messages[: index + 1], False)  # templates render the last turn completely
    if text.startswith(rendered):
        return start, len(rendered)
    end = _matching_end(rendered, text, start, messages[index])
    if end is None:  # the end token of a last turn may differ, or be an additional one
        end = _matching_end(_without_end(rendered, special_tokens), text, start, messages[index])
        ended = end is not None and text[start:end].rstrip().endswith(tuple(special_tokens))
        if end is not None and not ended:
            end += max((len(token) for token in special_tokens if text.startswith(token, end)), default=0)
    return None if end is None else (start, end)


def _start(messages: Messages, index: int, text: str, render: Render) -> int | None:
    """Find the start of a turn: the end of the generation prompt, or of its part in the text."""
    prompt = render(messages[:index], True)
    if text.startswith(prompt):
        return len(prompt)
    prefix = render(messages[:index], False) if index else ""
    if not prompt.startswith(prefix):
        return None
    header = len(prefix) if text.startswith(prefix) else _matching_end(prefix, text, 0, messages[index - 1])
    if header is None:
        return None
    header_text = prompt[len(prefix) :]
    if text.startswith(header_text, header):
        return header + len(header_text)
    # The prompt may begin a reasoning block that the turn does not have. Text that is also rendered for a
    # different answer belongs to the template, not to this answer.
    replacement = "b" if str(messages[index]["content"]).lstrip().startswith("a") else "a"
    other = {"role": "assistant", "content": replacement}
    if "tool_calls" in messages[index]:  # templates may require the call of a result
        other["tool_calls"] = messages[index]["tool_calls"]
    replaced = [*messages[:index], other, *messages[index + 1 :]]
    start = header + _common_prefix_length(text[header:], header_text)
    start = min(start, _common_prefix_length(text, render(replaced, False)))
    tag = text.rfind("<", header, start)
    if tag > text.rfind(">", header, start):  # <think> and </think> have a common beginning
        start = tag
    return start if start > header else None


def _matching_end(rendered: str, text: str, first: int, message: dict[str, Any]) -> int | None:
    """Return the position in ``text`` at which the chat ``rendered`` ends; None if it is not found.

    ``text`` may omit or replace earlier parts of ``rendered``, so its longest suffix that occurs in ``text``
    at or after ``first`` is searched. The suffix must contain the last line of ``message``, the last message
    of ``rendered``, and the names of the tools that it calls.
    """
    low, high = 0, len(rendered)
    while low < high:  # bisection: if a suffix occurs, so do all shorter ones
        middle = (low + high) // 2
        low, high = (low, middle) if text.find(rendered[middle:], first) >= 0 else (middle + 1, high)
    tail = rendered[low:]
    content = str(message["content"]).strip().rpartition("\n")[2].rpartition(IMAGE)[2].strip()
    required = [content, *(call["function"]["name"] for call in message.get("tool_calls", ()))]
    if not tail.strip() or any(part not in tail for part in required):
        return None
    return text.find(tail, first) + len(tail)


def _without_end(rendered: str, special_tokens: Sequence[str]) -> str:
    """Remove a special token, and white space after it, from the end of a text."""
    stripped = rendered.rstrip()
    return next(
        (stripped.removesuffix(token) for token in special_tokens if stripped.endswith(token)), rendered
    )


def _common_prefix_length(first: str, second: str) -> int:
    """Return the length of the common prefix of two texts."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(first), len(second)))
