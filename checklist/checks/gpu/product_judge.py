"""Comparison of all GPUs of a model with the product's own figures: faults that no peer reveals."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from checklist.checks.gpu.peer_gpus import kinds_of
from checklist.judging.advice import finding
from checklist.judging.context import JudgingContext
from checklist.measurements import GpuHealth
from checklist.result import Finding

OWN_SHARE = 0.99  # of a power limit or a set clock; firmware rounds both
MEMORY_SHARE = 0.95  # CUDA on GeForce GPUs runs in performance state P2, about 3 % below the maximum
OWN_FIGURES = (  # code, value under load, the GPU's own value, least share of it, and the name of both
    ("power-cap", "power_limit_w", "power_default_w", OWN_SHARE, "power cap {:.0f} W or less of {:.0f}"),
    (
        "clock-set",
        "sm_clock_set_mhz",
        "sm_clock_default_mhz",
        OWN_SHARE,
        "set clock {:,} MHz or less of {:,}",
    ),
    ("memory-clock", "memory_clock_mhz", "memory_clock_most_mhz", MEMORY_SHARE, "memory {:,} MHz of {:,}"),
)
HOST_GENERATION = 5  # newest PCIe generation of most hosts: GPUs of generation 6 are also sold in hosts of 5
# GB/s of one lane in one direction, by generation (PCI-SIG: 8b/10b up to 2, 128b/130b from 3, FLITs from 6)
LANE_GBYTES_PER_S = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}


def below_product(context: JudgingContext, states: list[GpuHealth]) -> list[Finding]:
    """Report models of which every GPU is below its own figures under load. ``states``: those under load."""
    kinds, by_kind = kinds_of(context), defaultdict[str, list[GpuHealth]](list)
    for state in states:
        if state.rank in kinds:
            by_kind[kinds[state.rank]].append(state)
    findings = []
    for kind, of_kind in by_kind.items():
        single = of_kind[0] if len(of_kind) == 1 else None
        gpus = f"The only GPU of model {kind}" if single else f"All {len(of_kind)} GPUs of model {kind}"
        nodes = [] if single is None else [context.name_of_rank(single.rank)]
        ranks = [] if single is None else [single.rank]
        for code, symptom in (*_own_figures(of_kind), *_slow_slots(context, of_kind)):
            title = f"{gpus}: {symptom}."
            findings.append(finding("gpu-load", code, "WARN", title, nodes=nodes, ranks=ranks))
    return findings


def _own_figures(states: list[GpuHealth]) -> Iterator[tuple[str, str]]:
    """Yield code and symptom of each figure that is below its reference on all GPUs."""
    for code, field, own_field, share, symptom in OWN_FIGURES:
        values = [(getattr(state, field), getattr(state, own_field)) for state in states]
        if all(value is not None and own is not None and value < share * own for value, own in values):
            yield code, symptom.format(*max(values))


def _slow_slots(context: JudgingContext, states: list[GpuHealth]) -> Iterator[tuple[str, str]]:
    """Yield code and symptom if all PCIe links are slower than the GPUs support, and copies confirm it.

    A virtual machine may report a wrong generation or width, so a copy faster than the reported link
    disproves it, and without measured copies nothing is reported.
    """
    ranks = {state.rank for state in states}
    copies = [
        float(local.value)
        for local in context.measurements.locals
        if local.what in ("h2d", "d2h") and local.rank in ranks and local.value
    ]
    after = {state.rank: state for state in context.measurements.health if state.when == "after"}
    links = []
    for state in states:
        lanes = after.get(state.rank, state)
        current = _rate(state.pcie_generation, lanes.pcie_width)
        own_generation = min(state.pcie_generation_gpu or 0, HOST_GENERATION)
        own = _rate(own_generation, lanes.pcie_width_most)
        if current is None or own is None or current >= own:
            return
        links.append((current, own, own_generation, state, lanes))
    if not copies or not links:
        return
    current, own, own_generation, state, lanes = max(links, key=lambda link: link[0])
    if max(copies) <= current:
        link = f"PCIe {state.pcie_generation} x{lanes.pcie_width} ({current:.3g} GB/s)"
        own_link = f"PCIe {own_generation} x{lanes.pcie_width_most} ({own:.3g} GB/s)"
        symptom = f"{link} or slower where {own_link} is supported; "
        yield "pcie-product", f"{symptom}copies reach {max(copies):.3g} GB/s"


def _rate(generation: int | None, width: int | None) -> float | None:
    lane = LANE_GBYTES_PER_S.get(generation or 0)
    return None if lane is None or width is None else lane * width
