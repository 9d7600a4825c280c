"""A simulated run whose requests are answered by a test."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from checklist.options import Options
from checklist.run.control import Limits
from checklist.run.rendezvous import of_node
from checklist.run.requests import Outcome
from checklist.run.session import Session
from launchers.cluster.endpoint import Secret
from tests.checklist.runs import facts

Answer = Callable[[str, int, Mapping[str, Any]], Any]  # what, rank, arguments -> the rank's reply


class ScriptedSession(Session):
    """Nodes of one rank each on separate hosts; ``answer`` returns the reply of a rank."""

    def __init__(self, nodes: int, answer: Answer, **options: Any) -> None:
        place = of_node(node=0, nodes=nodes, processes=1, host="10.0.0.1", port=1, secret=Secret("s"))
        hub: Any = None  # nobody is there to be told anything
        super().__init__(Options(nodes=nodes, **options), place, hub, Limits())
        self._answer, self._all = answer, tuple(range(nodes))
        self.nodes = {rank: rank for rank in self._all}
        self.addresses = {rank: f"10.0.0.{rank + 1}" for rank in self._all}
        self.results.facts = {rank: facts(rank, 1, gpu_names=(), gpu_uuids=()) for rank in self._all}

    @property
    def ranks(self) -> tuple[int, ...]:
        return self._all

    def request(self, kind: str, arguments: Mapping[int, Mapping[str, Any]], **_: Any) -> Outcome:
        return Outcome(
            replies={rank: self._answer(kind, rank, request) for rank, request in arguments.items()}
        )
