"""Nodes suspected before the run, by a training run or a user, which are measured first."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from checklist.result import CheckResult, Finding

PARTNERS = 3  # partners of a suspect, each measured alone in both directions; two would not outvote it


def first_pairs(suspects: Collection[int], nodes: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Return the ordered pairs to measure first and alone: each suspect with some other nodes, both ways."""
    healthy = [node for node in nodes if node not in suspects]
    pairs = []
    for index, suspect in enumerate(node for node in nodes if node in suspects):
        partners = [healthy[(index + step) % len(healthy)] for step in range(min(PARTNERS, len(healthy)))]
        pairs += [pair for partner in partners for pair in ((suspect, partner), (partner, suspect))]
    return tuple(pairs)


def measured_suspects(suspects: Iterable[str], results: Iterable[CheckResult]) -> tuple[str, ...]:
    """Return the suspects of which checks gemm and pairs measured all ranks."""
    relevant = [check for check in results if check.measured and check.check in ("gemm", "pairs")]
    return tuple(name for name in suspects if relevant and all(name in check.nodes for check in relevant))


def describe_suspects(
    suspects: Iterable[str],
    present: Collection[str],
    measured_names: Collection[str],
    findings: Iterable[Finding],
) -> tuple[str, ...]:
    """Return one line per suspect: its finding, that it has none, or that it was not measured."""
    lines = []
    finding_of_name = {name: item for item in reversed([*findings]) for name in (*item.nodes, *item.suspects)}
    for name in suspects:
        if name not in present:
            lines.append(f"{name}, suspected before this run, is not among its nodes.")
        elif name in finding_of_name:
            lines.append(f"{name}, suspected before this run: {finding_of_name[name].title}")
        elif name in measured_names:
            lines.append(f"{name}, suspected before this run, was measured first: nothing is wrong with it.")
        else:
            lines.append(f"{name}, suspected before this run, could not be measured.")
    return tuple(lines)
