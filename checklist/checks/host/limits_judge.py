"""Check of the CPU and memory that a container or host gives to its ranks."""

from __future__ import annotations

import statistics
from collections import defaultdict

from checklist.judging.advice import finding
from checklist.judging.context import JudgingContext, Judgment, decide
from checklist.measurements import Counters, Facts
from checklist.reference import machine_of
from checklist.result import Finding
from estimator.formatting import format_bytes

THROTTLED = 0.25  # share of the quota's periods in which it was used up
LEAST_PERIODS = 10  # fewer, of mostly 100 ms, say little
PEERS = 3  # nodes of a kind from which one with less than the others is found
BELOW_PEERS = 0.8  # share of the peers' median
RANK_BYTES = 1 << 30  # torch and NCCL in one process take up to this


def host_limits(context: JudgingContext) -> Judgment:
    """WARN for a node whose CPU quota or memory limit holds its ranks up.

    WARN if the CPU quota was used up in many of its periods during a phase, if there is less than one CPU for
    each rank or less memory than its ranks need, or if a node has less of either than others of its kind.

    Limits: ``THROTTLED``, 25 %, of at least ``LEAST_PERIODS``; ``RANK_BYTES``, 1 GiB for each rank; with
    ``PEERS``, 3, nodes of a kind ``BELOW_PEERS``, 80 %, of their median.

    Not detected: CPUs that other jobs of the host use; how much memory the training will take.
    """
    hosts = [fact for fact in context.leaders if fact.cpus is not None or fact.memory_bytes is not None]
    hosts = hosts[: 1 if context.local else None]
    if not hosts:
        return context.unmeasured("host-limits", "facts")
    findings = [
        *(finding for fact in hosts for finding in _too_little(context, fact)),
        *_below_peers(context, hosts),
        *_throttled(context),
    ]
    cpus = min((fact.cpus for fact in hosts if fact.cpus is not None), default=None)
    memory = min((fact.memory_bytes for fact in hosts if fact.memory_bytes is not None), default=None)
    limits = [f"{cpus:g} CPUs"] if cpus is not None else []
    limits += [f"{format_bytes(memory)} of memory"] if memory is not None else []
    return decide(
        "host-limits", f"At least {' and '.join(limits)} on each node.", findings, nodes=context.all_names
    )


def _too_little(context: JudgingContext, fact: Facts) -> list[Finding]:
    name, findings = context.name(fact.node), []
    ranks = context.measurements.gpus_per_node_asked
    if fact.cpus is not None and fact.cpus < ranks:
        title = f"{name} may use {fact.cpus:g} CPUs for {ranks} ranks."
        findings.append(finding("host-limits", "cpu-limit", "WARN", title, suspects=[name]))
    if fact.memory_bytes is not None and fact.memory_bytes < ranks * RANK_BYTES:
        title = f"{name} may use {format_bytes(fact.memory_bytes)} of memory for {ranks} ranks, which need "
        title += f"about {format_bytes(ranks * RANK_BYTES)} before a model is loaded."
        findings.append(finding("host-limits", "memory-limit", "WARN", title, suspects=[name]))
    return findings


def _below_peers(context: JudgingContext, hosts: list[Facts]) -> list[Finding]:
    by_kind: dict[str, list[Facts]] = defaultdict(list)
    for fact in hosts:
        by_kind[machine_of(fact)].append(fact)
    findings = []
    for hosts_of_kind in by_kind.values() if not context.local else ():
        for code, resource, values in (
            ("cpu-limit", "CPUs", {fact.node: fact.cpus for fact in hosts_of_kind}),
            ("memory-limit", "memory", {fact.node: fact.memory_bytes for fact in hosts_of_kind}),
        ):
            amounts = {node: float(value) for node, value in values.items() if value is not None}
            if len(amounts) < PEERS:
                continue
            median = statistics.median(amounts.values())
            less = [node for node, value in amounts.items() if value < BELOW_PEERS * median]
            for node in less:
                name = context.name(node)
                amount, typical = (
                    (f"{amounts[node]:g} CPUs", f"{median:g}")
                    if resource == "CPUs"
                    else (f"{format_bytes(int(amounts[node]))} of memory", format_bytes(int(median)))
                )
                title = f"{name} may use {amount}; most nodes like it have {typical}."
                findings.append(finding("host-limits", code, "WARN", title, suspects=[name]))
    return findings


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
