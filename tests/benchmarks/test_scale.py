"""Benchmarks of a gang's channel and records at any size; the page shows each value."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import scale


@pytest.mark.slow
def test_all_members_are_notified_of_a_lost_member() -> None:
    measured = scale.gang(6)
    assert 0 < measured["notified_seconds"] < 60
    assert measured["joined_seconds"] < 60


def test_the_messages_of_a_gang_are_counted(tmp_path: Path) -> None:
    measured = scale.records(tmp_path, 3)
    # A part's eight files and its manifest, and checkpoint.json
    assert measured["keys"] == 3 * (scale.GPUS + 1) + 1
    assert measured["disruption_bytes"] > 3 * len("pod js-1b2c3d-worker-0-0-x7k2p on node-0: deleted")
