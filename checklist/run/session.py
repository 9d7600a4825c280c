"""Shared state of the phases of one run: ranks, measurements so far, and requests."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, field, replace
from typing import Any

from checklist.measurements import (
    Collective,
    Counters,
    Diagnosed,
    Facts,
    GpuHealth,
    Local,
    OpenPorts,
    Pair,
    Phase,
    Probe,
    Repeated,
    Transport,
    Unsound,
)
from checklist.options import Options
from checklist.run.control import Hub, Limits
from checklist.run.rendezvous import Rendezvous
from checklist.run.requests import Requests


@dataclass
class Collected:
    """Measurements of the run so far."""

    facts: dict[int, Facts] = field(default_factory=dict)
    health: list[GpuHealth] = field(default_factory=list)
    probes: list[Probe] = field(default_factory=list)
    open_ports: list[OpenPorts] = field(default_factory=list)
    locals: list[Local] = field(default_factory=list)
    diagnosed: list[Diagnosed] = field(default_factory=list)
    repeated: list[Repeated] = field(default_factory=list)
    collectives: list[Collective] = field(default_factory=list)
    pairs: list[Pair] = field(default_factory=list)
    counters: list[Counters] = field(default_factory=list)
    phases: list[Phase] = field(default_factory=list)
    transport: Transport | None = None
    unsound: list[Unsound] = field(default_factory=list)


class Session(Requests):
    """State of one run for its phases, in rank 0's node agent."""

    def __init__(self, options: Options, rendezvous: Rendezvous, hub: Hub, limits: Limits) -> None:
        super().__init__(hub, limits)
        self.options, self.rendezvous = options, rendezvous
        self.results = Collected()
        self.addresses: dict[int, str] = {}  # by rank: address at which other nodes reach its host
        self.hosts: dict[int, str] = {}  # by node: hostname in its join request
        self.callers: dict[int, str] = {}  # by node: source address of its connection
        self.unusable: dict[int, str] = {}  # by rank: why its backend cannot reach other hosts
        self.device, self.backend = "cpu", "gloo"
        self.scratch = secrets.token_hex(6)  # part of the names of temporary files
        self.began_unix, self._begin = time.time(), time.monotonic()

    @property
    def leaders(self) -> dict[int, int]:
        """First rank of each connected node."""
        first: dict[int, int] = {}
        for rank in self.ranks:
            first.setdefault(self.nodes.get(rank, -1), rank)
        return {node: rank for node, rank in first.items() if node >= 0}

    def stop(self) -> None:
        """End the run: stop waiting for requests and start no further phase."""
        self.stopped.set()

    def fact(self, rank: int, **changes: Any) -> None:
        """Update the facts of a rank."""
        self.results.facts[rank] = replace(self.results.facts[rank], **changes)
