"""Writes a drawn card into Metaflow's."""

from __future__ import annotations

from typing import Any

from decorators.card import Chart, Text, draw
from decorators.state import CardState


def write(manager: Any, state: CardState) -> None:
    """Replace the content of a card (Metaflow's CardComponentManager) by a drawing of ``state``."""
    from metaflow.cards import Markdown, Table, VegaChart

    def component(block: Any) -> Any:
        if isinstance(block, Text):
            return Markdown(block.markdown)
        if isinstance(block, Chart):
            return VegaChart(block.spec)
        return Table(
            headers=list(block.headers),
            data=[[component(c) if not isinstance(c, str) else c for c in row] for row in block.rows],
        )

    manager.clear()
    manager.extend([component(block) for block in draw(state)])
