"""One layout on one instance type: its figures, and the shortage of hardware that no layout fits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from estimator import throughput
from estimator.formatting import format_bytes, format_count
from estimator.hardware import Gpu
from estimator.plan import Interruptions, Layout, MemoryEstimate, StartUp
from estimator.planning.interruptions import wall_hours
from estimator.planning.places import Place
from estimator.vocabulary import SHARDINGS

# Relative differences below this are ties: four fifths of published speeds are from 15 % below the predicted
# one to 19 % above it (data/efficiency.csv, range), and part of the error is common to all plans of a job, as
# are model and engine.
TIE_MARGIN = 0.2
# From an out-of-memory failure to the next request: the steps up to the peak, and the reaction of a person or
# of the flow. A choice.
REPLAN_HOURS = 0.1
# Largest share of the forward pass in a step: with frozen weights, the backward pass has as many products
# (throughput/flops.py)
FORWARD_SHARE = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """One layout that fits on one instance type."""

    layout: Layout
    memory: MemoryEstimate
    gpu: Gpu | None
    place: Place | None
    speed: throughput.Speed
    start_up: StartUp | None = None  # None: the nodes are available
    interruptions: Interruptions | None = None  # None: no spot nodes, or the rate is unknown
    checkpoint_bytes: int | None = None  # of one node
    evaluated_tokens: int = 0  # held-out tokens of evaluations during training
    unmeasured: bool = False  # no measured run on a similar GPU

    @property
    def usd_per_hour(self) -> float | None:
        """USD per hour of all nodes; None without a price.

        For shared cluster nodes, the price of the GPUs used.
        """
        if self.place is None or self.place.usd_per_hour is None:
            return None
        share = self.layout.processes_per_node / self.place.gpus if self.place.shared else 1.0
        return self.place.usd_per_hour * self.layout.nodes * share

    @property
    def start_up_hours(self) -> float:
        """Hours from the request of the nodes to the first step; 0 if they are available."""
        return self.start_up.hours if self.start_up is not None else 0.0

    @property
    def idle_gpus(self) -> int:
        """GPUs that are paid but not used."""
        if self.place is None or self.place.shared or not self.place.name:
            return 0
        return (self.place.gpus - self.layout.processes_per_node) * self.layout.nodes

    @property
    def usd_per_token(self) -> float | None:
        """USD per training token; None if price or speed is unknown."""
        if self.usd_per_hour is None or self.speed.tokens_per_second is None:
            return None
        return self.usd_per_hour / 3600 / self.speed.tokens_per_second

    def hours(self, tokens: int | None) -> float | None:
        """Return hours for this many tokens, with start-up, evaluations and lost work; None if unknown."""
        trained = self.training_hours(tokens)
        if trained is None:
            return None
        if self.interruptions is not None:
            trained = wall_hours(trained, self.interruptions)
        return trained + self.start_up_hours

    def training_hours(self, tokens: int | None) -> float | None:
        """Return hours of training and evaluations for this many tokens; None if unknown."""
        speed = self.speed.tokens_per_second
        if tokens is None or speed is None:
            return None
        return tokens / speed / 3600 + (self.evaluation_hours or 0.0)

    @property
    def evaluation_hours(self) -> float | None:
        """Maximum hours of evaluations during training; None if the speed is unknown."""
        speed = self.speed.tokens_per_second
        return None if speed is None else self.evaluated_tokens * FORWARD_SHARE / speed / 3600

    @property
    def _failed_hours(self) -> float:
        """Expected hours lost to out-of-memory failures: each costs a start-up and a new plan."""
        risk = min(self.memory.out_of_memory_risk or 0.0, 0.99)
        return risk / (1 - risk) * (self.start_up_hours + REPLAN_HOURS)

    def expected_hours(self, tokens: int | None) -> float | None:
        """Return hours for this many tokens, with out-of-memory failures; None if unknown."""
        hours = self.hours(tokens)
        return None if hours is None else hours + self._failed_hours

    def expected_usd(self, tokens: int | None) -> float | None:
        """Return USD for this many tokens, with out-of-memory failures; None if unknown."""
        usd, hourly = self.usd(tokens), self.usd_per_hour
        return None if usd is None or hourly is None else usd + hourly * self._failed_hours

    def usd(self, tokens: int | None) -> float | None:
        """Return USD for this many tokens; None if tokens, speed or price are unknown."""
        hours, hourly = self.hours(tokens), self.usd_per_hour
        return None if hours is None or hourly is None else hours * hourly

    @property
    def hardware(self) -> str:
        """Description of GPUs and nodes."""
        if self.gpu is None or self.place is None:
            return f"{format_count(self.layout.world_size, 'process')}"
        return describe_nodes(self.place, self.layout.nodes, self.layout.processes_per_node)


@dataclass(frozen=True, kw_only=True, slots=True)
class Shortage:
    """Shortage, in bytes, on hardware that not even the leanest layout fits."""

    hardware: str
    needs: int
    has: int
    where: Literal["memory", "host memory", "disk"] = "memory"

    @property
    def over(self) -> float:
        """Excess as a fraction of the available memory."""
        return self.needs / self.has - 1

    @property
    def reason(self) -> str:
        """Description: needed, available and excess memory."""
        kind = "" if self.where == "memory" else f" of {self.where}"
        return (
            f"needs {format_bytes(self.needs)}{kind}, has {format_bytes(self.has)}: {percent(self.over)} over"
        )

    def __str__(self) -> str:
        return f"{self.hardware}: {self.reason}"


def complexity(layout: Layout) -> tuple[int, bool]:
    """Return the complexity of a layout, smaller is simpler, and whether it offloads.

    In order: one copy of the model; replicas; sharded states; split layers, tensors or sequences.
    """
    divided = (
        layout.tensor_parallel * layout.context_parallel * layout.pipeline_parallel * layout.expert_parallel
    )
    copies = int(layout.sharding != "none" and layout.world_size > 1)
    shared = 2 if SHARDINGS[layout.sharding].divides else copies
    return 3 if divided > 1 else shared, layout.offload != "none"


def describe_nodes(place: Place, nodes: int, per_node: int) -> str:
    """Describe GPUs and nodes: "16x H100 SXM (2 p5.48xlarge)"."""
    if not place.name:
        return f"{nodes * per_node}x {place.gpu.name}" + (f" ({nodes} nodes)" if nodes > 1 else "")
    name = place.name if nodes == 1 else f"{nodes} {place.name}"
    return f"{nodes * per_node}x {place.gpu.name} ({name})"


def percent(value: float) -> str:
    """Format a fraction as percent, with one decimal below 10 %."""
    return f"{value * 100:.1f} %" if abs(value) < 0.1 else f"{value * 100:.0f} %"
