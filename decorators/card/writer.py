"""Writes a drawn card into Metaflow's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from decorators._metaflow import make_in_process
from decorators.card.blocks import Block, Chart, Log, Text
from decorators.card.step import draw
from decorators.profile.history import CardState


def write(manager: Any, state: CardState) -> None:
    """Replace the content of a card (Metaflow's CardComponentManager) by a drawing of ``state``."""
    write_blocks(manager, draw(state))


def write_blocks(manager: Any, blocks: Sequence[Block]) -> None:
    """Replace the content of a card by these blocks."""
    make_in_process(manager)
    manager.clear()
    manager.extend(components(blocks))


def components(blocks: Sequence[Block]) -> list[Any]:
    """The blocks as Metaflow's components of cards."""
    return [_component(block) for block in blocks]


def _component(block: Block) -> Any:
    from metaflow.cards import Markdown, PythonCode, Table, VegaChart

    if isinstance(block, Text):
        return Markdown(block.markdown)
    if isinstance(block, Chart):
        return VegaChart(block.spec)
    if isinstance(block, Log):
        return PythonCode(code_string=block.text)  # its only block of lines as they are
    return Table(headers=list(block.headers), data=[list(row) for row in block.rows])
