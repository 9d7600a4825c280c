"""Advice for findings: one or two lines, with a command to copy where useful.

Texts are in ``advice.yaml`` next to the judges of each subject, and here for all subjects. Placeholders in
braces are filled with values of the finding; literal braces are doubled.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from checklist.result import Finding, Gravity

_PACKAGE = Path(__file__).parents[1]
FILES = (_PACKAGE / "judging" / "advice.yaml", *sorted(_PACKAGE.glob("checks/*/advice.yaml")))


@dataclass(frozen=True, slots=True)
class Advice:
    """Text templates with placeholders: {nodes}, {ranks} and those passed with the finding."""

    lines: tuple[str, ...]
    command: str | None = None


@cache
def table() -> dict[str, Advice]:
    """Load all advice, by code."""
    import yaml  # heavy to import

    return {
        code: Advice(lines=tuple(item["lines"]), command=item.get("command"))
        for file in FILES
        for code, item in yaml.safe_load(file.read_text()).items()
    }


class _Placeholders(dict[str, Any]):
    def __missing__(self, key: str) -> str:
        return f"<{key}>"


def finding(
    check: str,
    code: str,
    verdict: Gravity,
    title: str,
    *,
    nodes: Iterable[str] = (),
    suspects: Iterable[str] = (),
    ranks: Iterable[int] = (),
    links: Iterable[tuple[str, str]] = (),
    **placeholders: object,
) -> Finding:
    """Build a finding with its advice. ``placeholders``: their values; others are shown unfilled."""
    advice = table()[code]
    names, suspect_names, numbers = tuple(nodes), tuple(suspects), tuple(ranks)
    values = _Placeholders(placeholders) | {
        "nodes": " ".join(names) or " ".join(suspect_names) or "<node>",
        "ranks": ", ".join(map(str, numbers)),
    }
    values = _Placeholders(values)
    return Finding(
        check=check,
        code=code,
        verdict=verdict,
        title=title,
        nodes=names,
        suspects=suspect_names,
        ranks=numbers,
        links=tuple(links),
        advice=tuple(line.format_map(values) for line in advice.lines),
        command=None if advice.command is None else advice.command.format_map(values),
    )
