"""Nodes that are looked at first, as something before this run held them suspect: a training, or a person."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from checklist.result import CheckResult, Finding

PARTNERS = 3  # others with which a suspect is measured alone, in both directions: two would not outvote it


def first_pairs(suspects: Collection[int], nodes: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Ordered pairs to measure alone before all others: each suspect with a few that aren't, both ways."""
    others = [node for node in nodes if node not in suspects]
    found = []
    for place, suspect in enumerate(node for node in nodes if node in suspects):
        chosen = [others[(place + step) % len(others)] for step in range(min(PARTNERS, len(others)))]
        found += [way for other in chosen for way in ((suspect, other), (other, suspect))]
    return tuple(found)


def measured(suspects: Iterable[str], results: Iterable[CheckResult]) -> tuple[str, ...]:
    """Those of which each check that decides and was made on nodes has measured all ranks."""
    speaking = [one for one in results if one.measured and one.check in ("gemm", "pairs")]
    return tuple(name for name in suspects if speaking and all(name in one.nodes for one in speaking))


def told(
    suspects: Iterable[str], present: Collection[str], seen: Collection[str], findings: Iterable[Finding]
) -> tuple[str, ...]:
    """A line for each: what was found against it, that nothing was, or that it wasn't looked at."""
    lines = []
    blamed = {name: one for one in reversed([*findings]) for name in (*one.nodes, *one.suspects)}
    for name in suspects:
        if name not in present:
            lines.append(f"{name}, suspected before this run, is not among its nodes.")
        elif name in blamed:
            lines.append(f"{name}, suspected before this run: {blamed[name].title}")
        elif name in seen:
            lines.append(f"{name}, suspected before this run, was looked at first: nothing is wrong with it.")
        else:
            lines.append(f"{name}, suspected before this run, could not be measured.")
    return tuple(lines)
