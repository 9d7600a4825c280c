"""Comparable parts of a cluster: ranks that are peers, and pairs of nodes whose paths are of one class.

Figures are compared only within one class. Nodes are of one kind if they have the same GPU model (without
GPUs, the same machine type). A path runs within an NVLink domain, within a leaf of the network, or across
leaves. The class of a path is that scope plus the kinds of its two ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from checklist.measurements import Facts

ACROSS, LEAF, DOMAIN = range(3)  # from the widest path to the narrowest
ACROSS_LEAVES, WITHIN_LEAF = "across leaves", "within a leaf"
WORDS = (ACROSS_LEAVES, WITHIN_LEAF, "within an NVLink domain")
Ints = NDArray[np.int64]
T = TypeVar("T", bound=Hashable)


@dataclass(frozen=True, kw_only=True, slots=True)
class Paths:
    """Kind, leaf and NVLink domain of each node, encoded as numbers; -1: unknown."""

    kinds: tuple[int, ...]
    leaves: tuple[int, ...]
    domains: tuple[int, ...]
    names: tuple[str, ...] = ("",)
    """Names of the kinds, indexed by kind."""

    @classmethod
    def uniform(cls, nodes: int) -> Paths:
        """Build the paths of nodes without known facts: one kind, one class of path."""
        return cls(kinds=(0,) * nodes, leaves=(-1,) * nodes, domains=(-1,) * nodes)

    @classmethod
    def from_facts(cls, facts: Iterable[Facts], nodes: int) -> Paths:
        """Build the paths of ``nodes`` nodes from the facts of each node's first rank.

        A node without a kind is assumed to be of the most common kind, because a missing label must not
        exempt it from comparison.
        """
        first: dict[int, Facts] = {}
        for fact in sorted(facts, key=lambda fact: fact.rank):
            first.setdefault(fact.node, fact)
        reported = [kind_of(first[node]) if node in first else None for node in range(nodes)]
        most_common = Counter(kind for kind in reported if kind).most_common(1)
        labels = [kind or (most_common[0][0] if most_common else "") for kind in reported]
        kinds = tuple(dict.fromkeys(labels))
        leaf_of = _leaves(first)
        return cls(
            kinds=tuple(kinds.index(name) for name in labels),
            leaves=_numbers([leaf_of.get(node) for node in range(nodes)]),
            domains=_numbers([first[node].nvlink_domain if node in first else None for node in range(nodes)]),
            names=kinds or ("",),
        )

    def path(self, src: Ints, dst: Ints) -> Ints:
        """Return ACROSS, LEAF or DOMAIN for each pair of nodes."""
        leaves, domains = np.array(self.leaves), np.array(self.domains)
        path = np.full(len(src), ACROSS, dtype=np.int64)
        path[(leaves[src] == leaves[dst]) & (leaves[src] >= 0)] = LEAF
        path[(domains[src] == domains[dst]) & (domains[src] >= 0)] = DOMAIN
        return path

    def classes(self, src: Ints, dst: Ints) -> Ints:
        """Return the number of each pair's class, the same for both directions."""
        kinds, count = np.array(self.kinds), len(self.names)
        low, high = np.minimum(kinds[src], kinds[dst]), np.maximum(kinds[src], kinds[dst])
        numbers: Ints = (self.path(src, dst) * count + low) * count + high
        return numbers

    def one_kind(self, number: int) -> bool:
        """Return whether both ends of the class are of one kind."""
        count = len(self.names)
        return number // count % count == number % count

    def describe(self, number: int) -> str:
        """Describe a class for users."""
        count = len(self.names)
        path, low, high = number // count**2, number // count % count, number % count
        path_words = WORDS[path] if path != ACROSS or self.have_leaves else "between nodes"
        kinds = "" if count == 1 else f", {self.names[low]}"
        return path_words + kinds + ("" if low == high else f" and {self.names[high]}")

    @property
    def have_leaves(self) -> bool:
        """Whether the network layers of any node are known."""
        return any(leaf >= 0 for leaf in self.leaves)


def kind_of(fact: Facts) -> str | None:
    """Return the kind of a node: its GPU model, or the machine type without GPUs."""
    return fact.gpu_names[0] if fact.gpu_names else fact.instance_type


def peers_of(fact: Facts) -> tuple[str | None, str | None]:
    """Return the key shared by a rank's peers: model of its GPU, and NVLink domain."""
    model = fact.gpu_names[fact.local_rank] if fact.local_rank < len(fact.gpu_names) else None
    return model or kind_of(fact), fact.nvlink_domain


def _leaves(first: dict[int, Facts]) -> dict[int, tuple[str, ...]]:
    """Return, by node, the smallest network unit shared by at least two nodes; smaller ones are hosts."""
    leaves_by_node = {node: fact.network_nodes for node, fact in first.items() if fact.network_nodes}
    depth = min((len(layers) for layers in leaves_by_node.values()), default=0)
    for layers in range(depth, 0, -1):
        units = {node: names[:layers] for node, names in leaves_by_node.items()}
        if len(set(units.values())) < len(units):
            return units
    return {}


def _numbers(names: Sequence[T | None]) -> tuple[int, ...]:
    known = {name: number for number, name in enumerate(dict.fromkeys(n for n in names if n is not None))}
    return tuple(-1 if name is None else known[name] for name in names)
