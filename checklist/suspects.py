"""Nodes suspected before the run, by a training run or a user, which are measured first."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from checklist.result import CheckResult, Finding

PARTNERS = 3  # partners of a suspect, each measured alone in both directions; two would not outvote it


def first_pairs(suspects: Collection[int], nodes: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Return the ordered pairs to measure first and alone: each suspect with some other nodes, both ways."""
    others = [node for node in nodes if node not in suspects]
    found = []
    for place, suspect in enumerate(node for node in nodes if node in suspects):
        chosen = [others[(place + step) % len(others)] for step in range(min(PARTNERS, len(others)))]
        found += [way for other in chosen for way in ((suspect, other), (other, suspect))]
    return tuple(found)


def measured(suspects: Iterable[str], results: Iterable[CheckResult]) -> tuple[str, ...]:
    """Return the suspects of which checks gemm and pairs measured all ranks."""
    speaking = [one for one in results if one.measured and one.check in ("gemm", "pairs")]
    return tuple(name for name in suspects if speaking and all(name in one.nodes for one in speaking))


def describe_suspects(
    suspects: Iterable[str], present: Collection[str], seen: Collection[str], findings: Iterable[Finding]
) -> tuple[str, ...]:
    """Return one line per suspect: its finding, that it has none, or that it was not measured."""
    lines = []
    blamed = {name: one for one in reversed([*findings]) for name in (*one.nodes, *one.suspects)}
    for name in suspects:
        if name not in present:
            lines.append(f"{name}, suspected before this run, is not among its nodes.")
        elif name in blamed:
            lines.append(f"{name}, suspected before this run: {blamed[name].title}")
        elif name in seen:
            lines.append(f"{name}, suspected before this run, was measured first: nothing is wrong with it.")
        else:
            lines.append(f"{name}, suspected before this run, could not be measured.")
    return tuple(lines)
