"""Grouping of slow links into one uplink: all pairs between two groups of nodes and none within either."""

from __future__ import annotations

from collections.abc import Collection, Iterable

FEWEST_LINKS = 4  # two nodes to two nodes; with fewer, separate link faults are as likely
Link = tuple[int, int]


def uplinks(slow: Collection[Link], measured: Iterable[Link]) -> tuple[tuple[int, ...], ...]:
    """Return groups of nodes between which every measured pair is slow, smallest first; () if there are none.

    The order of a link's ends is irrelevant. A group is a connected component of the graph of healthy pairs,
    so no topology labels are needed. A group of one is a node fault, which the diagnosis reports.
    """
    slow_links = {(min(link), max(link)) for link in slow}
    measured_links = {(min(link), max(link)) for link in measured}
    if len(slow_links) < FEWEST_LINKS:
        return ()
    group: dict[int, int] = {node: node for link in measured_links for node in link}

    def head(node: int) -> int:
        while group[node] != node:
            group[node] = group[group[node]]
            node = group[node]
        return node

    for a, b in measured_links - slow_links:
        group[head(a)] = head(b)
    members: dict[int, list[int]] = {}
    for node in sorted(group):
        members.setdefault(head(node), []).append(node)
    groups = sorted((tuple(nodes) for nodes in members.values()), key=lambda one: (len(one), one))
    if len(groups) < 2 or len(groups[0]) < 2 or any(head(a) == head(b) for a, b in slow_links):
        return ()
    return tuple(groups)
