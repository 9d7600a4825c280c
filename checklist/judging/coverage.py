"""Coverage of each check: measured ranks, nodes and pairs. Too little coverage gives no verdict."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Literal

from checklist.analysis.baseline import DAY_S
from checklist.judging.context import JudgingContext, Judgment
from checklist.registry import BY_NODE, CHECKS, LOCALS
from checklist.result import CheckResult, Coverage, Finding
from checklist.round_robin import pairs_of

LEAST_SHARE = 0.9  # minimum share of the ranks or nodes, or of the pairs that a run of that size measures
WORLD = ("correctness", "latency", "bandwidth", "transport")
# Checks in which each rank is one GPU
OF_GPUS = ("dcgm", "gemm", "gpu-load", "corruption", "hbm", "host-copy", "peer-copy", "gpu-health", "gpus")
_WHEN = {"gpu-health": "after", "gpu-load": "loaded"}  # the record of GPU health that the check needs
Link = tuple[int, int]


def add(context: JudgingContext, judgment: Judgment) -> Judgment:
    """Add the coverage to a judgment; a PASS that covers less than ``LEAST_SHARE`` becomes NO-VERDICT.

    Also records nodes whose ranks were all measured, pairs measured both ways, and the subjects of findings.
    Later runs use these to decide which earlier failures were measured again.
    """
    result = judgment.result
    if not isinstance(result, CheckResult):
        return judgment
    findings = tuple(_with_gpus(context, fault) for fault in judgment.findings)
    suspect_names = {name for fault in findings for name in (*fault.nodes, *fault.suspects)}
    if any(not fault.nodes and not fault.suspects for fault in findings):
        suspect_names |= set(context.all_names)
    result = replace(result, doubted=tuple(sorted(suspect_names)))
    if result.measured:
        result = _covered(context, result)
    return replace(judgment, result=result, findings=findings)


def _covered(context: JudgingContext, result: CheckResult) -> CheckResult:
    check = result.check
    if CHECKS[check].between == "pair":
        return _of_pairs(context, result)
    if check == "hangs":
        return result
    world = context.measurements.nodes_asked * context.measurements.gpus_per_node_asked
    if check in WORLD:
        ranks = [item.ranks for item in context.measurements.collectives]
        # The backend's log covers all ranks, also without measured collectives
        return _limited(result, Coverage(what="ranks", measured=max(ranks, default=world), of=world))
    if check in BY_NODE:
        nodes = {context.nodes_by_rank[rank] for rank in _ranks_with_figures(context, check)}
        covered = Coverage(what="nodes", measured=len(nodes), of=context.measurements.nodes_asked)
        return _limited(_restrict(context, result, nodes), covered)
    covered_ranks = _ranks(context, check)
    missing = {node for rank, node in context.nodes_by_rank.items() if rank not in covered_ranks}
    complete = set(context.measurements.nodes) - missing
    unit: Literal["GPUs", "ranks"] = "GPUs" if context.cuda and check in OF_GPUS else "ranks"
    covered = Coverage(what=unit, measured=len(covered_ranks), of=world)
    return _limited(_restrict(context, result, complete), covered)


def _ranks(context: JudgingContext, check: str) -> set[int]:
    if check in {kind.check for kind in LOCALS.values()}:
        return _ranks_with_figures(context, check)
    if check == "corruption":
        return {item.rank for item in context.measurements.repeated} & context.nodes_by_rank.keys()
    if check == "dcgm":
        nodes = {item.node for item in context.measurements.diagnosed if item.error is None}
        return {rank for rank, node in context.nodes_by_rank.items() if node in nodes}
    if check in _WHEN:
        return {state.rank for state in context.measurements.health if state.when == _WHEN[check]}
    return set(context.nodes_by_rank)


def _ranks_with_figures(context: JudgingContext, check: str) -> set[int]:
    kinds = {kind.name for kind in LOCALS.values() if kind.check == check}
    ranks = {local.rank for local in context.measurements.locals if local.what in kinds}
    return ranks & context.nodes_by_rank.keys()


def _of_pairs(context: JudgingContext, result: CheckResult) -> CheckResult:
    run = context.measurements
    count = len(run.nodes)
    total = count * (count - 1) // 2
    if result.check == "mesh":
        if len(run.probes) == 2 * total and result.verdict == "PASS":  # the judge covered every pair
            return replace(result, coverage=Coverage(what="pairs", measured=total, of=total))
        directions = {(probe.src, probe.dst) for probe in run.probes}
    else:
        loss = result.check == "loss"
        directions = {
            (pair.src, pair.dst)
            for pair in run.pairs
            if not loss or pair.segments is not None or pair.gbytes_per_s_p95 is not None
        }
    links = sorted({(a, b) for a, b in directions if a < b and (b, a) in directions})
    if not links and result.check == "loss":  # counters alone cover nodes, not pairs
        return replace(result, links=())
    covered = Coverage(what="pairs", measured=len(links), of=total)
    expected = total if result.check == "mesh" else pairs_of(count)
    if len(links) < total:
        covered = _with_ages(context, covered, set(links))
        positions = {name: position for position, name in enumerate(context.all_names)}
        positions_of_links = [(positions[context.name(a)], positions[context.name(b)]) for a, b in links]
        result = replace(result, nodes=context.all_names, links=tuple(positions_of_links))
    return _limited(result, covered, expected)


def _with_ages(context: JudgingContext, covered: Coverage, links: set[Link]) -> Coverage:
    """Add the number of remaining pairs that earlier runs measured, and the age of the oldest of them."""
    node_of_name = {context.name(node): node for node in context.measurements.nodes}
    history = [
        unix
        for (a, b), unix in context.pairs_seen.items()
        if a in node_of_name
        and b in node_of_name
        and tuple(sorted((node_of_name[a], node_of_name[b]))) not in links
    ]
    oldest = min(history, default=None)
    days = None if oldest is None else (context.finished_unix - oldest) / DAY_S
    return replace(covered, earlier=len(history), oldest_days=days)


def _restrict(context: JudgingContext, result: CheckResult, nodes: Iterable[int]) -> CheckResult:
    names = set(context.names(nodes))
    return replace(result, nodes=tuple(name for name in result.nodes if name in names))


def _limited(result: CheckResult, covered: Coverage, expected: int | None = None) -> CheckResult:
    """Describe incomplete coverage in the result; remove the verdict if coverage is insufficient."""
    result = replace(result, coverage=covered)
    if covered.measured >= covered.of:
        return result
    extent = covered.description
    if (
        covered.measured < LEAST_SHARE * (covered.of if expected is None else expected)
        and result.verdict == "PASS"
    ):
        reason = f"Too little was measured: {extent}"
        return replace(result, verdict="NO-VERDICT", measured=False, reason=reason)
    return replace(result, reason=f"{result.reason} Measured: {extent}")


def _with_gpus(context: JudgingContext, fault: Finding) -> Finding:
    if not context.cuda or fault.check not in OF_GPUS:
        return fault
    ranks = set(fault.ranks)
    uuids = [fact.gpu_uuids[fact.local_rank :][:1] for fact in context.facts if fact.rank in ranks]
    return replace(fault, gpus=tuple(uuid for uuids_of_node in uuids for uuid in uuids_of_node))
