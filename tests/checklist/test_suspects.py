"""Suspects of earlier runs that are measured first."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import permutations
from typing import Any

from checklist.run.pairing import pairs
from checklist.suspects import PARTNERS, first_pairs
from checklist.verdict import judge
from tests.checklist.clusters import Cluster
from tests.checklist.run.sessions import ScriptedSession
from tests.checklist.runs import gpu_run, with_pairs


def test_each_suspect_is_measured_in_both_directions_with_healthy_partners() -> None:
    ways = first_pairs({2, 5}, range(8))
    assert len(ways) == 2 * 2 * PARTNERS
    for suspect in (2, 5):
        partners = {b for a, b in ways if a == suspect}
        assert partners == {a for a, b in ways if b == suspect}
        assert len(partners) == PARTNERS
        assert not partners & {2, 5}
    assert first_pairs({0, 1}, range(2)) == ()
    assert len(first_pairs({0}, range(2))) == 2


def test_the_result_reports_the_outcome_of_each_suspect() -> None:
    share = {3: 0.5}
    result = judge(
        with_pairs(gpu_run(8), Cluster(nodes=8, speed=45, transmit=share, receive=share)),
        suspects=("host-3", "host-4", "gone"),
    )
    slow, well, cleared = result.notes[:3]
    assert slow.startswith("host-3, suspected before this run: host-3 is slow")
    assert well == "host-4, suspected before this run, was measured first: nothing is wrong with it."
    assert cleared == "gone, suspected before this run, is not among its nodes."
    assert result.suspects_measured == ("host-3", "host-4")


def test_a_suspect_is_measured_alone_before_all_other_pairs() -> None:
    def answer(request_name: str, rank: int, reported: Mapping[str, Any]) -> Any:
        return 4000 if request_name == "listen" else {"seconds": [0.1] * 5, "bytes": 10**9, "error": None}

    run = ScriptedSession(3, answer, suspects=("host-2",))
    assert pairs(run) is None
    first, later = run.results.pairs[:4], run.results.pairs[4:]
    assert [(pair.src, pair.dst) for pair in first] == [(2, 0), (0, 2), (2, 1), (1, 2)]
    assert all(pair.alone for pair in first)
    assert {(pair.src, pair.dst) for pair in later if not pair.alone} == set(permutations(range(3), 2))
