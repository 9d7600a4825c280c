"""A step with a card made by the test."""

from __future__ import annotations

import pickle
from pathlib import Path

from metaflow import FlowSpec, card, current, step

from decorators.card.writer import write_blocks


class CardOfACheck(FlowSpec):
    @card(type="blank", id="checklist")
    @step
    def start(self) -> None:
        write_blocks(current.card["checklist"], pickle.loads(Path("drawn").read_bytes()))  # noqa: S301
        self.next(self.end)

    @step
    def end(self) -> None:
        pass


if __name__ == "__main__":
    CardOfACheck()
