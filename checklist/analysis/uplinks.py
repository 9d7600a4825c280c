"""Slow links that are one uplink: all pairs between two groups of nodes, and none within either."""

from __future__ import annotations

from collections.abc import Collection, Iterable

FEWEST_LINKS = 4  # between two and two; fewer are as well links of their own
Link = tuple[int, int]


def uplinks(slow: Collection[Link], measured: Iterable[Link]) -> tuple[tuple[int, ...], ...]:
    """The groups of nodes between which every measured pair is slow, the smallest first; () without any.

    Links in either order. Nodes of a group are those that reach each other, over one or more, by pairs that
    are well: found from the pairs alone, so no label is needed. A group of one is a node of its own, which
    the diagnosis names.
    """
    broken = {(min(link), max(link)) for link in slow}
    seen = {(min(link), max(link)) for link in measured}
    if len(broken) < FEWEST_LINKS:
        return ()
    group: dict[int, int] = {node: node for link in seen for node in link}

    def head(node: int) -> int:
        while group[node] != node:
            group[node] = group[group[node]]
            node = group[node]
        return node

    for a, b in seen - broken:
        group[head(a)] = head(b)
    members: dict[int, list[int]] = {}
    for node in sorted(group):
        members.setdefault(head(node), []).append(node)
    groups = sorted((tuple(one) for one in members.values()), key=lambda one: (len(one), one))
    if len(groups) < 2 or len(groups[0]) < 2 or any(head(a) == head(b) for a, b in broken):
        return ()
    return tuple(groups)
