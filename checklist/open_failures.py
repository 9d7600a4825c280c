"""Open failures of earlier runs, and the rules by which a later run clears them."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping

from checklist.registry import CHECKS, Profile, clears, find
from checklist.result import CheckResult, OpenFailure


def still_open(
    earlier: Iterable[OpenFailure],
    checks: Iterable[CheckResult],
    profile: Profile,
    gpus: Mapping[str, Collection[str]],
    began_unix: float = math.inf,
) -> tuple[OpenFailure, ...]:
    """Return the earlier failures that this run has not cleared.

    A failure is cleared by the same check in at least as deep a profile, if it measured the subject again:
    all its nodes with as many GPUs, the pair, the GPU (or its replacement), or as many nodes for a
    cluster-wide failure. The check must have no finding against those nodes; for a cluster-wide failure, none
    at all.

    Parameters
    ----------
    gpus:
        UUIDs of the GPUs that the run used, by node.
    began_unix:
        Start of the run; it does not clear failures found after that, by a concurrent run.
    """
    verdicts = {check.check: check for check in checks if check.verdict != "NO-VERDICT"}
    covered = {name: _Covered(check) for name, check in verdicts.items()}

    def cleared(item: OpenFailure) -> bool:
        if item.check not in CHECKS or item.check not in covered or item.seen_unix > began_unix:
            return False
        check = find(item.check)
        if not clears(check, profile, check, item.profile):
            return False
        return covered[item.check].clears(item) and all(
            _all_present(item, gpus.get(n, ())) for n in item.nodes
        )

    return tuple(item for item in earlier if not cleared(item))


class _Covered:
    """Nodes and pairs that one check of a run measured."""

    def __init__(self, check: CheckResult) -> None:
        self.nodes = set(check.nodes)
        self.passed = check.verdict == "PASS"
        self.doubted = self.nodes if check.doubted is None else set(check.doubted)
        self.links = None
        if check.links is not None:
            self.links = {frozenset((check.nodes[a], check.nodes[b])) for a, b in check.links}

    def clears(self, item: OpenFailure) -> bool:
        """Return whether the check measured all subjects of the failure and found nothing."""
        failed_nodes = set(item.nodes)
        if not failed_nodes <= self.nodes or len(self.nodes) < item.over_nodes:
            return False
        if not self.passed and (not failed_nodes or failed_nodes & self.doubted):
            return False
        return self.links is None or all(frozenset(link) in self.links for link in item.links)


def _all_present(item: OpenFailure, present: Collection[str]) -> bool:
    """Return whether the failed GPUs are present again, or all replaced so that the node has as many."""
    present_count = sum(uuid in present for uuid in item.gpus)
    return len(present) >= item.over_gpus and present_count in (0, len(item.gpus))
