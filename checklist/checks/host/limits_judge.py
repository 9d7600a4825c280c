"""Check of the CPU and memory that a container or host gives to its ranks."""

from __future__ import annotations

import statistics
from collections import defaultdict

from checklist.judging.advice import finding
from checklist.judging.context import JudgingContext, Judgment, decide
from checklist.measurements import Counters, Facts
from checklist.reference import machine_of
from checklist.result import Figure, Finding
from estimator.formatting import format_bytes

THROTTLED = 0.25  # share of the quota's periods in which it was used up
LEAST_PERIODS = 10  # minimum number of quota periods (mostly 100 ms each) to judge
PEERS = 3  # minimum number of nodes of a kind for a comparison
BELOW_PEERS = 0.8  # share of the peers' median
BUSY, BUSIER = 0.5, 2.0  # runnable processes per CPU before the checks, and multiple of the peers' median
RANK_BYTES = 1 << 30  # maximum memory of torch and NCCL in one process


def host_limits(context: JudgingContext) -> Judgment:
    """WARN for a node whose CPU quota or memory limit holds its ranks up.

    WARN if the CPU quota was used up in many of its periods during a phase, if there is less than one CPU for
    each rank or less memory than its ranks need, or if a node has less of either, slower memory (GPU nodes),
    or busier CPUs before the checks than others of its kind.

    Limits: ``THROTTLED``, 25 %, of at least ``LEAST_PERIODS``; ``RANK_BYTES``, 1 GiB for each rank; with
    ``PEERS``, 3, nodes of a kind ``BELOW_PEERS``, 80 %, of their median; ``BUSY``, 0.5 runnable processes per
    CPU, and ``BUSIER``, twice the median.

    Not detected: CPUs that are busy on all nodes; how much memory the training will take.
    """
    hosts = [fact for fact in context.leaders if fact.cpus is not None or fact.memory_bytes is not None]
    hosts = hosts[: 1 if context.local else None]
    if not hosts:
        return context.unmeasured("host-limits", "facts")
    too_little = [fault for fact in hosts for fault in _too_little(context, fact)]
    reported = {(fault.code, fault.suspects) for fault in too_little}
    below_peers = [f for f in _below_peers(context, hosts) if (f.code, f.suspects) not in reported]
    findings = [*too_little, *below_peers, *_throttled(context)]
    cpus = min((fact.cpus for fact in hosts if fact.cpus is not None), default=None)
    memory = min((fact.memory_bytes for fact in hosts if fact.memory_bytes is not None), default=None)
    limits = [f"{cpus:g} CPUs"] if cpus is not None else []
    limits += [f"{format_bytes(memory)} of memory"] if memory is not None else []
    figures = [
        Figure(name="memory_copy", value=value, unit="GB/s", verdict="NO-VERDICT", node=context.name(node))
        for node, value in _memory_bandwidth(context).items()
    ]
    passed = f"At least {' and '.join(limits)} on each node."
    return decide("host-limits", passed, findings, nodes=context.all_names, figures=figures)


def _too_little(context: JudgingContext, fact: Facts) -> list[Finding]:
    name, findings = context.name(fact.node), []
    ranks = context.measurements.gpus_per_node_asked
    if fact.cpus is not None and fact.cpus < ranks:
        title = f"{name} may use {fact.cpus:g} CPUs, fewer than one per rank ({ranks})."
        findings.append(finding("host-limits", "cpu-limit", "WARN", title, suspects=[name]))
    if fact.memory_bytes is not None and fact.memory_bytes < ranks * RANK_BYTES:
        title = f"{name} may use {format_bytes(fact.memory_bytes)} of memory; its ranks ({ranks}) need "
        title += f"about {format_bytes(ranks * RANK_BYTES)} before a model is loaded."
        findings.append(finding("host-limits", "memory-limit", "WARN", title, suspects=[name]))
    return findings


def _below_peers(context: JudgingContext, hosts: list[Facts]) -> list[Finding]:
    """Report nodes with less of a resource, or busier CPUs, than others of their kind."""
    by_kind: dict[str, list[Facts]] = defaultdict(list)
    for fact in hosts if not context.local else ():
        by_kind[machine_of(fact)].append(fact)
    bandwidth = _memory_bandwidth(context)
    findings = []
    for of_kind in by_kind.values():
        for code, text, values in (
            ("cpu-limit", "may use {} CPUs", {fact.node: fact.cpus for fact in of_kind}),
            ("memory-limit", "may use {} of memory", {fact.node: fact.memory_bytes for fact in of_kind}),
            ("memory-slow", "copies {} GB/s of memory", {f.node: bandwidth.get(f.node) for f in of_kind}),
        ):
            amounts = {node: float(value) for node, value in values.items() if value is not None}
            if len(amounts) < PEERS:
                continue
            median = statistics.median(amounts.values())
            for node, amount in amounts.items():
                if amount < BELOW_PEERS * median:
                    shown, typical = (
                        format_bytes(int(value)) if code == "memory-limit" else f"{value:.4g}"
                        for value in (amount, median)
                    )
                    name = context.name(node)
                    title = f"{name} {text.format(shown)}; most nodes like it have {typical}."
                    findings.append(finding("host-limits", code, "WARN", title, suspects=[name]))
        findings += _busy(context, of_kind)
    return findings


def _busy(context: JudgingContext, hosts: list[Facts]) -> list[Finding]:
    loads = {fact.node: fact.load_per_cpu for fact in hosts if fact.load_per_cpu is not None}
    if len(loads) < PEERS:
        return []
    median = statistics.median(loads.values())
    findings = []
    for node, load in loads.items():
        if load >= max(BUSY, BUSIER * median):
            name = context.name(node)
            title = f"{name} was busy before the checks: {load:.2g} runnable processes per CPU, most nodes "
            title += f"like it {median:.2g}."
            findings.append(finding("host-limits", "cpu-busy", "WARN", title, suspects=[name]))
    return findings


def _memory_bandwidth(context: JudgingContext) -> dict[int, float]:
    """Return GB/s of host memory copies by GPU node; empty without GPUs, where other load affects them."""
    return {
        context.nodes_by_rank[local.rank]: local.value
        for local in context.measurements.locals
        if context.cuda
        and local.what == "memory_copy"
        and local.value
        and local.rank in context.nodes_by_rank
    }


def _throttled(context: JudgingContext) -> list[Finding]:
    """Report each node once, in the phase in which its quota held it up most."""
    worst: dict[int, tuple[float, Counters]] = {}
    for counters in context.measurements.counters:
        if counters.cpu_periods is None or counters.cpu_throttled is None:
            continue
        if counters.cpu_periods < LEAST_PERIODS:
            continue
        share = counters.cpu_throttled / counters.cpu_periods
        if share >= THROTTLED and share > worst.get(counters.node, (0.0, counters))[0]:
            worst[counters.node] = (share, counters)
    cpus = {fact.node: fact.cpus for fact in context.leaders}
    findings = []
    for node, (share, counters) in sorted(worst.items()):
        name, quota = context.name(node), cpus.get(node)
        quota_text = "" if quota is None else f" of {quota:g} CPUs"
        title = f"The CPU quota{quota_text} of {name} was used up in {share:.0%} of phase {counters.phase}."
        findings.append(finding("host-limits", "cpu-throttled", "WARN", title, suspects=[name]))
    return findings
