"""Pictures of held-out captions while a run trains: the base's, and those of the last evaluations."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from launchers.report.telemetry import Drawn

NEWEST = 2  # evaluations whose pictures are kept beside the base's


class DrawnPictures:
    """Takes what was drawn in any order, and keeps what is shown."""

    def __init__(self) -> None:
        self._by_step: dict[int, Drawn] = {}

    def add(self, event: Drawn) -> None:
        self._by_step[event.step] = event
        later = sorted(step for step in self._by_step if step)
        for step in later[:-NEWEST]:
            del self._by_step[step]

    def shown(self) -> tuple[Drawn, ...]:
        """In the order of their steps; step 0 is the base."""
        return tuple(event for _, event in sorted(self._by_step.items()))

    def to_list(self, last_step: int) -> list[dict[str, Any]]:
        """Those up to a step, for JSON."""
        return [dataclasses.asdict(event) for event in self.shown() if event.step <= last_step]

    @classmethod
    def from_list(cls, values: Iterable[dict[str, Any]]) -> DrawnPictures:
        """Of what :meth:`to_list` gave."""
        found = cls()
        for each in values:
            found.add(Drawn(**each))
        return found
