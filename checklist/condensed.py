"""Reduction of a large run's result, which keeps the file below 20 MB at 1,024 nodes of 8 GPUs.

All measurements are judged before. The result keeps all data of components with findings and a summary of the
rest; verdicts, figures and the history are unaffected.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from typing import TypeVar

from checklist.measurements import SAME_AS_RANK, Facts, GpuHealth, Local, Measurements, Probe
from checklist.result import Figure, Result

MAX_RANKS = 1024  # above, data that is equal within a node or without findings is stored once or dropped
MAX_PROBES = 10_000  # connections; all of them up to 100 nodes
MAX_FIGURES = 64  # lowest figures kept per name, in addition to those without PASS
T = TypeVar("T")


def condensed(result: Result) -> Result:
    """Remove bulky data from the result and add a note about it."""
    run, notes = result.measurements, []
    if len(run.probes) > MAX_PROBES:
        notes.append(
            f"Of {len(run.probes):,} connections those that failed are kept in the result, and the slowest."
        )
    if len(run.facts) > MAX_RANKS:
        checks = tuple(replace(check, figures=_figures(check.figures)) for check in result.checks)
        result = replace(result, checks=checks)
        notes.append(
            f"Of {len(run.facts):,} ranks' figures the result keeps all that are no PASS and the "
            f"{MAX_FIGURES} lowest of each kind, without single samples; software and network interfaces "
            "of each node's first rank, and of others that differ."
        )
    if not notes:
        return result
    return replace(result, measurements=condensed_run(run), notes=(*result.notes, *notes))


def condensed_run(run: Measurements) -> Measurements:
    """Reduce the measurements, which cannot be judged afterward."""
    if len(run.probes) > MAX_PROBES:
        run = replace(run, probes=_probes(run.probes))
    return _ranks(run) if len(run.facts) > MAX_RANKS else run


def _probes(probes: tuple[Probe, ...]) -> tuple[Probe, ...]:
    slowest = sorted(probes, key=lambda probe: -(probe.seconds or 0.0))[: MAX_PROBES // 10]
    failed = (probe for probe in probes if not probe.connected or probe.bulk_ok is False)
    return tuple(dict.fromkeys((*failed, *slowest)))


def _figures(figures: Iterable[Figure]) -> tuple[Figure, ...]:
    by_name: dict[tuple[str, int | None], list[Figure]] = defaultdict(list)
    for figure in figures:
        by_name[figure.name, figure.bytes].append(figure)
    figures_shown: list[Figure] = []
    for figures_of_name in by_name.values():
        low_first = sorted(figures_of_name, key=lambda figure: figure.value)
        # Keep the highest besides the lowest, so displayed ranges stay correct
        selected = dict.fromkeys((*low_first[:MAX_FIGURES], low_first[-1]))
        selected |= dict.fromkeys(figure for figure in figures_of_name if figure.verdict in ("WARN", "FAIL"))
        figures_shown += [figure for figure in figures_of_name if figure in selected]
    return tuple(figures_shown)


def _ranks(run: Measurements) -> Measurements:
    first: dict[int, Facts] = {}
    for fact in sorted(run.facts, key=lambda fact: fact.rank):
        first.setdefault(fact.node, fact)
    ranks_after = {state.rank for state in run.health if state.when == "after"}
    first_with_ports = next((fact for fact in run.facts if fact.rdma_ports), None)
    return replace(
        run,
        facts=_settings_once(
            _without_repeated_ports(_without_repeats(fact, first[fact.node]), first_with_ports)
            for fact in run.facts
        ),
        # Values after the load are equal to or worse than before
        health=tuple(
            _shortened(state)
            for state in run.health
            if state.when == "after" or state.rank not in ranks_after
        ),
        locals=_locals(run.locals),
    )


def _without_repeats(fact: Facts, first: Facts) -> Facts:
    """Remove host facts from a rank that equal those of the node's first rank."""
    if fact is first:
        return fact
    return replace(
        fact,
        nics=() if fact.nics == first.nics else fact.nics,
        addresses=() if fact.addresses == first.addresses else fact.addresses,
        versions={} if fact.versions == first.versions else fact.versions,
        gpu_names=() if fact.gpu_names == first.gpu_names else fact.gpu_names,
        ib_devices=None if fact.ib_devices == first.ib_devices else fact.ib_devices,
        boot_id=None if fact.boot_id == first.boot_id else fact.boot_id,
        nic_reason=None if fact.nic_reason == first.nic_reason else fact.nic_reason,
        network_nodes=() if fact.network_nodes == first.network_nodes else fact.network_nodes,
    )


def _shortened(state: GpuHealth) -> GpuHealth:
    """Remove fields from a GPU's health that are common to all, or covered by findings."""
    return replace(
        state,
        nvlink_errors=None,
        nvlink_mbytes_per_s=None,
        pcie_width_most=None,
        pcie_generation_gpu=None,
        sm_clock_default_mhz=None,
        memory_clock_most_mhz=None,
        fabric_clique=None,
        fabric=None if state.fabric == "completed" else state.fabric,
    )


def _without_repeated_ports(fact: Facts, first_with_ports: Facts | None) -> Facts:
    """Remove RDMA ports from a rank's facts that equal those of the first node that reported any."""
    if (
        first_with_ports is None
        or fact.rank == first_with_ports.rank
        or fact.rdma_ports != first_with_ports.rdma_ports
    ):
        return fact
    return replace(fact, rdma_ports=None)


def _settings_once(facts: Iterable[Facts]) -> tuple[Facts, ...]:
    """Replace settings equal to an earlier rank's by a reference to that rank."""
    ranks: dict[tuple[tuple[str, str], ...], int] = {}
    facts_shown = []
    for fact in facts:
        if fact.settings:
            rank = ranks.setdefault(tuple(sorted(fact.settings.items())), fact.rank)
            fact = fact if rank == fact.rank else replace(fact, settings={SAME_AS_RANK: str(rank)})
        facts_shown.append(fact)
    return tuple(facts_shown)


def _locals(results: Iterable[Local]) -> tuple[Local, ...]:
    """Keep one figure per kind and rank (for copies to several peers the slowest), and all failures."""
    slowest: dict[tuple[int, str], Local] = {}
    failed = []
    for local in results:
        if local.value is None:
            failed.append(local)
            continue
        current = slowest.get((local.rank, local.what))
        if current is None or local.value < (current.value or 0.0):
            slowest[local.rank, local.what] = local
    return (*(replace(local, samples=()) for local in slowest.values()), *failed)
