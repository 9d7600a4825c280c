"""Physical upper bounds of figures: the GPU's data sheet and the node's line rate."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from checklist.measurements import Collective, Facts, Measurements
from checklist.registry import LOCALS
from estimator import hardware

BEYOND_SHEET = (
    1.5  # multiple of the data sheet's dense rate or memory bandwidth that no matmul or copy reaches
)
# Multiple of the line rate: all_reduce's busbw counts up to twice what crosses a node's network (two nodes of
# many ranks), and a bond may report the rate of only one port
BEYOND_LINE = 4.0
PHYSICAL_LIMITS = {
    "GB/s": 1e5,
    "TFLOPS": 1e5,
}  # ten times what the fastest GPU of estimator/data/gpus.csv has


class Ceiling(NamedTuple):
    """Upper bound of a figure, and a description of its source."""

    value: float
    description: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Ceilings:
    """Upper bounds of one run's figures."""

    gpus: dict[int, str]
    """Driver's name of the GPU, by rank."""
    lines: dict[int, float]
    """Line rate of the interface used by plain sockets, GB/s by node; empty if plain sockets are not used."""

    @classmethod
    def from_run(cls, run: Measurements) -> Ceilings:
        """Derive the ceilings of a run."""
        network = None if run.transport is None else run.transport.network
        sockets = not run.local and (run.backend == "gloo" or network == "socket")
        return cls.from_facts(run.facts, sockets=sockets)

    @classmethod
    def from_facts(cls, facts: Iterable[Facts], *, sockets: bool) -> Ceilings:
        """Derive the ceilings of hosts; ``sockets``: whether they use plain sockets over a network."""
        gpus, lines = {}, {}
        for fact in facts:
            if fact.local_rank < len(fact.gpu_names):
                gpus[fact.rank] = fact.gpu_names[fact.local_rank]
            rate = next((nic.gbps for nic in fact.nics if nic.name == fact.nic), None)
            if sockets and rate is not None and rate > 0:
                lines[fact.node] = rate / 8
        return cls(gpus=gpus, lines=lines)

    def local(self, rank: int, what: str) -> Ceiling | None:
        """Return the ceiling of a figure that a rank measures alone."""
        unit = LOCALS[what].unit
        gpu = hardware.find_gpu_by_nvml_name(self.gpus[rank]) if rank in self.gpus else None
        sheet = None
        if gpu is not None and what == "hbm_copy":
            sheet = gpu.bandwidth_gbps
        elif gpu is not None and what in ("gemm_bf16", "gemm_bf16_sustained"):
            sheet = dict(gpu.peak_tflops).get(what.split("_")[1])
        if gpu is None or sheet is None:
            return none_above(unit)
        return Ceiling(BEYOND_SHEET * sheet, f"{BEYOND_SHEET:g} times the data sheet of {gpu.name}")

    def pair(self, src: int, dst: int) -> Ceiling | None:
        """Return the ceiling of the bandwidth from one node to another."""
        line_rates = [self.lines[node] for node in (src, dst) if node in self.lines]
        return _of_line(min(line_rates)) if line_rates else none_above("GB/s")

    def world(self, item: Collective) -> Ceiling | None:
        """Return the ceiling of a collective's busbw."""
        across_nodes = item.nodes > 1 and len(self.lines) >= item.nodes
        return _of_line(min(self.lines.values())) if across_nodes else none_above("GB/s")


def _of_line(gbytes_per_s: float) -> Ceiling:
    return Ceiling(BEYOND_LINE * gbytes_per_s, f"{BEYOND_LINE:g} times the line rate")


def none_above(unit: str) -> Ceiling | None:
    """Return the hardware-independent ceiling of a unit; None for times."""
    return Ceiling(PHYSICAL_LIMITS[unit], "which no hardware can do") if unit in PHYSICAL_LIMITS else None
