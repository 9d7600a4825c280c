"""Hostile inputs: valid inputs with values, text and bytes that often break parsers."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

TEXTS = (
    *("", "\0", "\ud800", "\x1b]52;c;aGk=\x07", "\u202etxt.exe", "../../outside", "/etc/passwd", "a/b", "."),
    *("*a", "{{ x }}", "NaN", "1e999", "0x7fffffff", "12:30:45", "2024-99-99", "9" * 5000, "a" * 10_000),
)
NUMBERS = (0, -1, 2**31, 2**63, 10**30, 10**400, 1e308, -1e-308, float("nan"), float("inf"))


def _nested(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value


VALUES: tuple[Any, ...] = (
    None,
    True,
    [],
    {},
    [[]] * 50,
    {"a": {"b": {}}},
    _nested(60),
    _nested(150),
    *TEXTS,
    *NUMBERS,
)
BYTES = (
    *(b"\xff\xfe", b"\x00", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"\n" * 100, b'"', b"{", b"]", b",,,", b"\\u"),
    *(b"'", b"[" * 100_000, b'{"a":' * 30_000, b"[]," * 50_000, b'"k":1,' * 20_000, b"," * 50_000),
    *(b"- " * 2_000, b"(" * 10_000, b"9" * 10_000, b"../" * 50, b"&a [*a]"),
    *(b"a: &a [x,x]\nb: &b [*a,*a,*a]\nc: [*b,*b]\n", b"!!python/object/apply:os.system [id]"),
    *(b"%YAML 9.9\n---\n", b"? [a]\n: b\n", b"{% for x in y %}" * 100),
)
values = st.one_of(st.sampled_from(VALUES), st.text(max_size=10), st.integers(), st.floats())


@st.composite
def damaged(draw: st.DrawFn, seed: bytes) -> bytes:
    """Return the seed with a few changes: to values if it is JSON, else to bytes."""
    value = _json(seed)
    if value is not None and draw(st.integers(0, 3)):
        for _ in range(draw(st.integers(1, 3))):
            value = _changed(draw, value)
        return json.dumps(value).encode("utf-8", "surrogatepass")
    data = bytearray(seed)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(data)))
        cut = draw(st.sampled_from((0, 0, 1, 2, 8, len(data))))
        data[at : at + cut] = draw(st.one_of(st.sampled_from(BYTES), st.binary(max_size=12)))
    return bytes(data)


def _json(seed: bytes) -> Any:
    try:
        return json.loads(seed)
    except ValueError:
        return None


def _changed(draw: st.DrawFn, value: Any) -> Any:
    """Replace, remove or add one value, at any level."""
    inner = (
        list(value.items())
        if isinstance(value, dict)
        else list(enumerate(value))
        if isinstance(value, list)
        else []
    )
    if not inner or not draw(st.integers(0, 5)):
        return draw(values)
    key, child = draw(st.sampled_from(inner[:200]))
    action = draw(st.sampled_from(("deeper", "deeper", "replace", "remove", "add")))
    if action == "deeper":
        changed = _changed(draw, child)
    elif action == "replace":
        changed = draw(values)
    if isinstance(value, list):
        value = list(value)
        if action == "remove":
            del value[key]
        elif action == "add":
            value.insert(key, draw(values))
        else:
            value[key] = changed
        return value
    if action == "remove":
        return {name: each for name, each in value.items() if name != key}
    if action == "add":
        return {**value, draw(st.one_of(st.sampled_from(TEXTS), st.text(max_size=5))): draw(values)}
    return {**value, key: changed}
