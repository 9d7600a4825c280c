"""What the card shows, as plain values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from decorators.state import CardState


@dataclass(frozen=True, kw_only=True, slots=True)
class Text:
    markdown: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    spec: dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    headers: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]


Block = Text | Chart | Grid


def draw(state: CardState) -> list[Block]:
    return [Text(markdown=f"# {state.measured.step}\n{state.plan.model if state.plan else 'no plan'}")]
