"""Failures that stay open: what clears one, whatever node, pair or GPU it is of."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping

from checklist.checks import CHECKS, Profile, clears, find
from checklist.result import CheckResult, Standing


def still_open(
    earlier: Iterable[Standing],
    checks: Iterable[CheckResult],
    profile: Profile,
    gpus: Mapping[str, Collection[str]],
    began_unix: float = math.inf,
) -> tuple[Standing, ...]:
    """The earlier failures that a run has not cleared; ``gpus``: the UUIDs that it has used, by node.

    What was found after ``began_unix``, when the run began, was found beside it, and it can't clear that.

    Only the same check, asked at least as hard, clears one, and only where it has measured what had failed:
    the nodes with as many GPUs, that very pair, that GPU (or another in its place), as many nodes where it
    concerned the cluster as a whole. And it must have nothing against those nodes; against a cluster, nothing
    at all.
    """
    given = {check.check: check for check in checks if check.verdict != "NO-VERDICT"}
    covered = {name: _Covered(check) for name, check in given.items()}

    def cleared(item: Standing) -> bool:
        if item.check not in CHECKS or item.check not in covered or item.seen_unix > began_unix:
            return False
        check = find(item.check)
        if not clears(check, profile, check, item.profile):
            return False
        return covered[item.check].clears(item) and all(_again(item, gpus.get(n, ())) for n in item.nodes)

    return tuple(item for item in earlier if not cleared(item))


class _Covered:
    """What one check of a run speaks for."""

    def __init__(self, check: CheckResult) -> None:
        self.nodes = set(check.nodes)
        self.passed = check.verdict == "PASS"
        self.doubted = self.nodes if check.doubted is None else set(check.doubted)
        self.links = None
        if check.links is not None:
            self.links = {frozenset((check.nodes[a], check.nodes[b])) for a, b in check.links}

    def clears(self, item: Standing) -> bool:
        """Whether it has looked at all that the failure is of, and found nothing."""
        wanted = set(item.nodes)
        if not wanted <= self.nodes or len(self.nodes) < item.over_nodes:
            return False
        if not self.passed and (not wanted or wanted & self.doubted):
            return False
        return self.links is None or all(frozenset(link) in self.links for link in item.links)


def _again(item: Standing, present: Collection[str]) -> bool:
    """Whether a GPU that had failed was there again, or is gone and its node has as many without it."""
    there = sum(uuid in present for uuid in item.gpus)
    return len(present) >= item.over_gpus and there in (0, len(item.gpus))
