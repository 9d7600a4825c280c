"""Nodes that are looked at first."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from checklist import result as results
from checklist.suspects import PARTNERS, first_pairs
from checklist.verdict import judge
from tests.checklist.clusters import Cluster
from tests.checklist.runs import gpu_run, with_pairs


def test_each_suspect_is_measured_both_ways_with_nodes_that_are_none() -> None:
    ways = first_pairs({2, 5}, range(8))
    assert len(ways) == 2 * 2 * PARTNERS
    for suspect in (2, 5):
        others = {b for a, b in ways if a == suspect}
        assert others == {a for a, b in ways if b == suspect}
        assert len(others) == PARTNERS
        assert not others & {2, 5}
    assert first_pairs({0, 1}, range(2)) == ()
    assert len(first_pairs({0}, range(2))) == 2


def test_the_result_says_of_each_suspect_what_was_found() -> None:
    share = {3: 0.5}
    result = judge(
        with_pairs(gpu_run(8), Cluster(nodes=8, speed=45, transmit=share, receive=share)),
        suspects=("host-3", "host-4", "gone"),
    )
    slow, well, gone = result.notes[:3]
    assert slow.startswith("host-3, suspected before this run: host-3 is slow")
    assert well == "host-4, suspected before this run, was measured first: nothing is wrong with it."
    assert gone == "gone, suspected before this run, is not among its nodes."
    assert result.suspects_measured == ("host-3", "host-4")


def test_a_suspect_is_measured_alone_before_all_other_pairs(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    command = [sys.executable, "-m", "checklist", "--device", "cpu", "--nodes", "3", "--only", "pairs"]
    done = subprocess.run(
        [*command, "--suspects", "local2", "--json", str(file)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode in (0, 1, 3), done.stderr
    pairs = sorted(results.read(file).measurements.pairs, key=lambda pair: pair.round)
    first = pairs[:4]
    assert {(pair.src, pair.dst) for pair in first} == {(2, 0), (0, 2), (2, 1), (1, 2)}
    assert all(pair.alone for pair in first)
    assert {(p.src, p.dst) for p in pairs if not p.alone} == {(a, b) for a in range(3) for b in range(3)} - {
        (a, a) for a in range(3)
    }
    assert json.loads(file.read_text())["suspects_measured"] == ["local2"]
