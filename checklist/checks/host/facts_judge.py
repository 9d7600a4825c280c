"""Checks of the ranks' facts: size of the job, equal software on all ranks, and set-up of the hosts."""

from __future__ import annotations

import re
import statistics
from collections import Counter, defaultdict

from checklist.judging import shared_hosts
from checklist.judging.advice import finding
from checklist.judging.context import JudgingContext, Judgment, decide, no_verdict, shorten, skipped
from checklist.result import Finding, Gravity
from estimator.formatting import format_bytes

_GIB = 2**30
LEAST_SHM = _GIB  # NCCL uses tens of MB for each rank, data loaders far more; 64 MB is Docker's default
LEAST_MEMLOCK = _GIB
UNLIMITED = -1
SKEW_WARN_S = 1.0  # logs of different nodes can no longer be merged in order
SKEW_FAIL_S = 900.0  # S3 refuses requests that are 15 minutes off
ONE_EVERYWHERE = ("torch", "cuda", "nccl", "driver")  # a mix of these can hang; other mixes are harmless
TORCH_HANGS = ((2, 6, 0), (2, 7, 1))  # versions between the two, exclusive: pytorch#153960


def ranks(context: JudgingContext) -> Judgment:
    """FAIL if fewer ranks or nodes joined than requested, or if two of them are the same host or GPU.

    Two nodes are the same host if their kernels' boot ids are equal, two ranks share a GPU if the UUIDs are.
    WARN if the nodes have unequal numbers of ranks.

    Limits: none; everything is counted.

    Not detected: why a rank is missing. Hosts without a known boot id count as different ones.
    """
    run = context.measurements
    world = run.nodes_asked * run.gpus_per_node_asked
    if not context.facts:
        return context.unmeasured("ranks", "facts")
    findings = _missing(context, world) or _unequal(context)
    findings += [*_shared_hosts(context), *_shared_gpus(context)]
    passed = f"{len(context.facts)} ranks on {len(run.nodes)} nodes, as requested."
    return decide("ranks", passed, findings, nodes=context.all_names)


def _missing(context: JudgingContext, world: int) -> list[Finding]:
    asked, seen = context.measurements.nodes_asked, len(context.measurements.nodes)
    if len(context.facts) >= world and seen >= asked:
        return []
    if seen == 1 < asked and len(context.measurements.hosts) < 2:
        title = f"{asked} nodes requested, 1 seen ({context.all_names[0]}): separate jobs, or its control "
        title += "ports are blocked."
        return [finding("ranks", "ranks-separate", "FAIL", title)]
    title = (
        f"{world} ranks on {asked} nodes requested, {len(context.facts)} on {seen} seen{_absent(context)}."
    )
    return [finding("ranks", "ranks-missing", "FAIL", title)]


def _absent(context: JudgingContext) -> str:
    """Describe the nodes that reported no facts, from data of the control channel."""
    joined = set(context.measurements.nodes)
    absent = tuple(
        context.name(node) for node in range(context.measurements.nodes_asked) if node not in joined
    )
    return f"; without {shorten(absent)}" if absent else ""


def _unequal(context: JudgingContext) -> list[Finding]:
    counts = Counter(fact.node for fact in context.facts)
    if len(set(counts.values())) == 1:
        return []
    by_count: dict[int, list[int]] = defaultdict(list)
    for node, count in sorted(counts.items()):
        by_count[count].append(node)
    common = max(by_count, key=lambda count: len(by_count[count]))
    odd = context.names(node for node, count in counts.items() if count != common)
    ranks_per_node = "; ".join(
        f"{count} on {shorten(context.names(nodes))}" for count, nodes in sorted(by_count.items())
    )
    return [
        finding(
            "ranks", "ranks-unequal", "WARN", f"The nodes' ranks are unequal: {ranks_per_node}.", suspects=odd
        )
    ]


def _shared_hosts(context: JudgingContext) -> list[Finding]:
    if context.local:
        return []
    by_boot: dict[str, set[int]] = defaultdict(set)
    for fact in context.leaders:
        if fact.boot_id is not None:
            by_boot[fact.boot_id].add(fact.node)
    return [
        finding(
            "ranks",
            "nodes-share-host",
            "FAIL",
            f"{', '.join(context.names(nodes))} are {len(nodes)} nodes on one host.",
        )
        for nodes in by_boot.values()
        if len(nodes) > 1
    ]


def _shared_gpus(context: JudgingContext) -> list[Finding]:
    users: dict[str, list[int]] = defaultdict(list)
    for fact in context.facts if context.cuda else ():
        if fact.local_rank < len(fact.gpu_uuids):
            users[fact.gpu_uuids[fact.local_rank]].append(fact.rank)
    return [
        finding(
            "ranks",
            "gpu-shared",
            "FAIL",
            f"Ranks {', '.join(map(str, sharing))} use one GPU, {uuid}.",
            ranks=sharing,
        )
        for uuid, sharing in users.items()
        if len(sharing) > 1
    ]


def versions(context: JudgingContext) -> Judgment:
    """FAIL if a library of ``ONE_EVERYWHERE`` differs between ranks, WARN if any other does.

    WARN also for a version of torch that is known to hang with NCCL.

    Limits: ``TORCH_HANGS``, versions between its first and second, exclusive (pytorch#153960).

    Not detected: which of the versions is right, and whether a mix hangs in practice.
    """
    if not context.facts:
        return context.unmeasured("versions", "facts")
    findings = []
    for name in sorted({key for fact in context.facts for key in fact.versions}):
        holders: dict[str, set[int]] = defaultdict(set)
        for fact in context.facts:
            value = fact.versions.get(name)
            if value is not None:
                holders[value].add(fact.node)
        if len(holders) > 1:
            holders_text = "; ".join(
                f"{value} on {', '.join(context.names(nodes))}" for value, nodes in holders.items()
            )
            required = name in ONE_EVERYWHERE
            findings.append(
                finding(
                    "versions",
                    "versions-differ",
                    "FAIL" if required else "WARN",
                    f"{name} differs: {holders_text}.",
                )
            )
    torch = str(context.facts[0].versions.get("torch") or "")
    if context.cuda and TORCH_HANGS[0] < _release(torch) < TORCH_HANGS[1]:
        title = f"torch {torch} can hang with NCCL."
        findings.append(finding("versions", "torch-hang", "WARN", title, version=torch))
    if not any(fact.versions for fact in context.facts):
        return context.unmeasured("versions", "facts")
    return decide("versions", "The same software on all ranks.", findings, nodes=context.all_names)


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])


def shared_memory(context: JudgingContext) -> Judgment:
    """FAIL (on CPUs WARN) for a node whose /dev/shm is smaller than NCCL and data loaders need.

    Limits: ``LEAST_SHM``, 1 GiB: NCCL uses tens of MB for each rank, loaders more; Docker gives 64 MB.

    Not detected: how much the job's data loaders will use.
    """
    sizes = [(fact, fact.shm_bytes) for fact in context.leaders if fact.shm_bytes is not None]
    if not sizes:
        return context.unmeasured("shared-memory", "facts")
    findings = [
        finding(
            "shared-memory",
            "shm-small",
            "FAIL" if context.cuda else "WARN",
            f"{context.name(fact.node)} has {format_bytes(size)} of shared memory, "
            f"not {format_bytes(LEAST_SHM)}.",
            suspects=[context.name(fact.node)],
        )
        for fact, size in sizes
        if size < LEAST_SHM
    ]
    smallest = min(size for _, size in sizes)
    return decide(
        "shared-memory", f"At least {format_bytes(smallest)} on each node.", findings, nodes=context.all_names
    )


def memlock(context: JudgingContext) -> Judgment:
    """FAIL for a node whose memlock limit is too low for RDMA, WARN for any other limit.

    Limits: ``LEAST_MEMLOCK``, 1 GiB: less is too small for a rank's registered buffers; the vendors of EFA
    and InfiniBand require ``UNLIMITED``.

    Not detected: anything without RDMA devices; the check is skipped then.
    """
    if not any(fact.efa_devices or fact.ib_devices for fact in context.facts):
        return skipped("memlock", "There are no RDMA devices.")
    limits = [(fact, fact.memlock_bytes) for fact in context.leaders if fact.memlock_bytes is not None]
    if not limits:
        return context.unmeasured("memlock", "facts")
    findings = [
        finding(
            "memlock",
            "memlock-low",
            "FAIL" if limit < LEAST_MEMLOCK else "WARN",
            f"{context.name(fact.node)} may lock only {format_bytes(limit)} of memory.",
            suspects=[context.name(fact.node)],
        )
        for fact, limit in limits
        if limit != UNLIMITED
    ]
    return decide("memlock", "Unlimited on each node.", findings, nodes=context.all_names)


def clock(context: JudgingContext) -> Judgment:
    """WARN for a node whose clock deviates from the others, FAIL if S3 would reject its requests.

    The reference is the median of all clocks, including rank 0's; with two nodes both are suspects. The
    uncertainty of the round trip is resolved in the node's favor.

    Limits: ``SKEW_WARN_S``, 1 s: logs can no longer be merged in order; ``SKEW_FAIL_S``, 900 s: AWS rejects
    signatures that are 15 minutes off.

    Not detected: which of two clocks is right, so the node is a suspect only.
    """
    if context.local or len(context.leaders) < 2:
        return skipped("clock", "All ranks are on one machine.")
    offsets = [(fact, fact.clock_offset_s) for fact in context.leaders if fact.clock_offset_s is not None]
    if len(offsets) < len(context.leaders):
        return context.unmeasured("clock", "facts")
    findings = []
    if len(offsets) == 2:
        common = 0.0
        offsets = offsets[1:]  # rank 0's offset is zero by definition
    else:
        common = statistics.median_low(offset for _, offset in offsets)
    for fact, offset in offsets:
        deviation = offset - common
        certain = abs(deviation) - (fact.clock_offset_error_s or 0.0)
        if certain > SKEW_WARN_S:
            name = context.name(fact.node)
            title, suspects = (
                f"The clock of {name} differs by {deviation:+.1f} s from those of its peers.",
                [name],
            )
            if len(context.leaders) == 2:
                suspects = [*context.all_names]
                title = f"The clocks of {' and '.join(suspects)} are {abs(deviation):.1f} s apart."
            verdict: Gravity = "FAIL" if certain > SKEW_FAIL_S else "WARN"
            findings.append(finding("clock", "clock-skew", verdict, title, suspects=suspects))
    largest = max(abs(offset - common) for _, offset in offsets)
    return decide("clock", f"The clocks agree within {largest:.3f} s.", findings, nodes=context.all_names)


def placement(context: JudgingContext) -> Judgment:
    """WARN if the nodes of this run are in several zones or placement groups.

    Limits: none.

    Not detected: anything if a zone is unknown (NO-VERDICT); the distance of hosts within a zone. Network
    layers from node labels, and virtual machines of one physical host, are listed without a verdict.
    """
    if context.local or len(context.leaders) < 2:
        return skipped("placement", "All ranks are on one machine.")
    zones = {fact.node: fact.zone for fact in context.leaders}
    if None in zones.values():
        return no_verdict(
            "placement",
            "The zone of some nodes is not known: the metadata service does not answer. Set NODE_ZONE, or "
            "NODE_NAME by the downward API and let the pods get nodes.",
        )
    different = Counter(str(zone) for zone in zones.values())
    findings = []
    if len(different) > 1:
        summary = ", ".join(f"{count} in {zone}" for zone, count in different.most_common())
        findings.append(
            finding("placement", "zones-differ", "WARN", f"The nodes are in different zones: {summary}.")
        )
    groups = Counter(fact.placement_group or "none" for fact in context.leaders)
    if len(groups) > 1:
        summary = ", ".join(f"{count} in {group}" for group, count in groups.most_common())
        title = f"The nodes are in different placement groups: {summary}."
        findings.append(finding("placement", "groups-differ", "WARN", title))
    summary = f"All nodes are in {next(iter(different))}"
    layers = [fact.network_nodes for fact in context.leaders]
    if all(layers):
        shared = sum(len(set(layer)) == 1 for layer in zip(*layers, strict=False))
        summary += f" and share {shared} of {min(map(len, layers))} layers of the network"
    groups_text = "".join(
        f" Virtual machines of one physical host: {shorten(group)}." for group in shared_hosts.hosts(context)
    )
    return decide("placement", f"{summary}.{groups_text}", findings, nodes=context.all_names)
