"""Writes a drawn card into Metaflow's."""

from __future__ import annotations

from typing import Any

from decorators.card import Block, Chart, Text, draw
from decorators.state import CardState


def write(manager: Any, state: CardState) -> None:
    """Replace the content of a card (Metaflow's CardComponentManager) by a drawing of ``state``."""
    manager.clear()
    manager.extend([_component(block) for block in draw(state)])


def _component(block: Block) -> Any:
    from metaflow.cards import Markdown, Table, VegaChart

    if isinstance(block, Text):
        return Markdown(block.markdown)
    if isinstance(block, Chart):
        return VegaChart(block.spec)
    return Table(headers=list(block.headers), data=[list(row) for row in block.rows])
