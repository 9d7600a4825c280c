"""Check for silent data corruption: equal arithmetic must give equal bits on every repeat and device."""

from __future__ import annotations

from collections import Counter

from checklist.judging.advice import finding
from checklist.judging.context import JudgingContext, Judgment, decide, shorten
from checklist.result import Finding


def corruption(context: JudgingContext) -> Judgment:
    """FAIL for a rank whose matmul is not bitwise equal on every repeat, or differs from the other ranks.

    The product of random operands is compared between repeats on one rank: cuBLAS gives the same bits on one
    stream of one GPU (its documentation, "Results Reproducibility"), oneDNN and MKL with the same threads.
    The product of small integers is exact in any order, so it is compared over all ranks regardless of GPU;
    the bits of more than half of the ranks are the reference.

    Limits: none; a single bit fails. Fleets see such faults on a few of a thousand machines (Dixit et al.
    2021, "Silent Data Corruptions at Scale"; Hochschild et al. 2021, "Cores that do not count").

    Not detected: faults at another temperature, clock or instruction; only bfloat16 (on CPUs fp32) matmuls
    are compared, for a fraction of the load's time. If the ranks split into two halves, all are suspects.
    """
    results = [item for item in context.measurements.repeated if item.rank in context.nodes_by_rank]
    if not results:
        return context.unmeasured("corruption", "node")
    findings = [_unsteady(context, item.rank, item.differing) for item in results if item.differing]
    unsteady = {item.rank for item in results if item.differing}
    digests = {item.rank: item.digest for item in results if item.whole and item.rank not in unsteady}
    findings += _minority(context, digests)
    times = min(item.times for item in results)
    ranks = len({item.rank for item in results})
    passed = f"A matrix product has the same bits on {ranks} ranks, at least {times} times each."
    nodes = context.names({context.nodes_by_rank[item.rank] for item in results})
    return decide("corruption", passed, findings, nodes=nodes)


def _unsteady(context: JudgingContext, rank: int, differing: int) -> Finding:
    name = context.name(context.nodes_by_rank[rank])
    title = (
        f"Rank {rank} on {name} computes wrong values at times: {differing:,} values of a product differed."
    )
    return finding("corruption", "corruption", "FAIL", title, nodes=[name], ranks=[rank])


def _minority(context: JudgingContext, digests: dict[int, str]) -> list[Finding]:
    """Report ranks whose exact product differs from that of most ranks."""
    counts = Counter(digests.values())
    if len(counts) < 2:
        return []
    majority, count = counts.most_common(1)[0]
    if 2 * count <= len(digests):
        suspects = context.names({context.nodes_by_rank[rank] for rank in digests})
        title = (
            f"An exact product has {len(counts)} results on {shorten(suspects)}, none of them on more than "
        )
        title += "half of the ranks."
        return [finding("corruption", "corruption", "FAIL", title, suspects=suspects, ranks=sorted(digests))]
    return [
        finding(
            "corruption",
            "corruption",
            "FAIL",
            f"Rank {rank} on {context.name(context.nodes_by_rank[rank])} computes wrong products.",
            nodes=[context.name(context.nodes_by_rank[rank])],
            ranks=[rank],
        )
        for rank, digest in sorted(digests.items())
        if digest != majority
    ]
