"""Conversion of a card's blocks to Metaflow's card components."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

from decorators._metaflow import make_in_process
from decorators.card.blocks import Block, Chart, Grid, Log, Picture, Text
from decorators.card.state import CardState
from decorators.card.step import draw


def write(manager: Any, state: CardState) -> None:
    """Replace the content of a card (Metaflow's CardComponentManager) by the blocks of ``state``."""
    write_blocks(manager, draw(state))


def write_blocks(manager: Any, blocks: Sequence[Block]) -> None:
    """Replace the content of a card by these blocks."""
    make_in_process(manager)
    manager.clear()
    manager.extend(components(blocks))


def components(blocks: Sequence[Block]) -> list[Any]:
    """Convert blocks to Metaflow's card components."""
    return [_component(block) for block in blocks]


def _component(block: Block) -> Any:
    from metaflow.cards import Image, Markdown, PythonCode, Table, VegaChart

    if isinstance(block, Text):
        return Markdown(block.markdown)
    if isinstance(block, Chart):
        return VegaChart(block.spec)
    if isinstance(block, Log):
        return PythonCode(code_string=block.text)  # Metaflow's only component with preformatted lines
    if isinstance(block, Picture):
        return Image(src=base64.b64decode(block.png), label=block.label)
    rows = [[_cell(cell) for cell in row] for row in block.rows]
    return Table(headers=list(block.headers), data=rows)


def _cell(cell: Any) -> Any:
    return _component(cell) if isinstance(cell, Text | Chart | Grid | Log | Picture) else cell
