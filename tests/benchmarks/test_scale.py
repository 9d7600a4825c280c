"""A gang's channel and records are measured at any size; the page has each figure."""

from __future__ import annotations

from pathlib import Path

from benchmarks import scale


def test_a_lost_member_is_told_to_all_others() -> None:
    measured = scale.gang(6)
    assert 0 < measured["told_seconds"] < 60
    assert measured["joined_seconds"] < 60


def test_the_records_of_a_gang_are_counted(tmp_path: Path) -> None:
    measured = scale.records(tmp_path, 3)
    # A part's eight files and its manifest, and checkpoint.json
    assert measured["keys"] == 3 * (scale.GPUS + 1) + 1
    assert measured["disruption_bytes"] > 3 * len("pod js-1b2c3d-worker-0-0-x7k2p on node-0: deleted")


def test_the_page_has_each_figure() -> None:
    page = scale.text(
        {
            "command": scale.COMMAND,
            "machine": {"text": "on this machine"},
            "cluster": {"nodes": 5000, "plan_seconds": 9.25, "preflight_seconds": 4.5, "plan_bytes": 3811},
            "gang": {
                "nodes": 1024,
                "joined_seconds": 1.2,
                "idle_share_of_a_core": 0.08,
                "hub_mib": 61.0,
                "decided_seconds": 2.02,
                "told_seconds": 0.08,
            },
            "records": {
                "nodes": 1024,
                "parts_seconds": 30.0,
                "commit_seconds": 0.5,
                "find_seconds": 0.25,
                "checkpoint_bytes": 83,
                "keys": 9217,
                "disruption_bytes": 58000,
            },
        }
    )
    for line in (
        "| the preflight of that plan, all its questions | 4.5 s |",
        "| node 0 while nothing happens | 8% of a core |",
        "| a killed node is decided on after | 2.02 s |",
        "| its keys; `checkpoint.json` | 9,217; 83 bytes |",
        "| a disruption of all pods, as it is noted | 58 kB |",
    ):
        assert line in page.splitlines()
