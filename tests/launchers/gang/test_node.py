"""Gangs that finish without faults."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from launchers.gang.allocator import NAME
from launchers.store.bundles import LocalStorage
from launchers.store.checkpoints import CheckpointStore
from tests.launchers.gang.conftest import Gang

NewGang = Callable[..., Gang]


def test_two_nodes_with_two_ranks_each_finish(gang: NewGang, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints are stored as one unit, node 0 has the speed of all ranks, and no process is left."""
    monkeypatch.setenv(NAME, "max_split_size_mb:64")
    in_collectives = (0.5, 0.25, 0.125, 0.0)
    orders = {"steps": 6, "every": 2, "step_s": 0.3, "in_collectives": in_collectives, "child": True}
    orders |= {"at": 1, "do": "tell_environment"}
    two = gang(nodes=2, processes=2, store=True, device="cuda", orders=orders).start_all()
    for node in (0, 1):
        assert two.end(node) == {}, two.logs()
    two.wait_until_ended(within=60)
    store = CheckpointStore(LocalStorage(two.folder / "store"), "run/train")
    assert [checkpoint.step for checkpoint in store.candidates()] == [6, 4]
    restored = two.folder / "restored"
    store.restore(next(store.candidates()), restored)
    assert sorted(path.name for path in restored.iterdir()) == [
        *(f"rank-{rank:05d}.json" for rank in range(4)),
        *(f"state-{rank}.bin" for rank in range(4)),
    ]
    assert not list(two.folder.glob("node-*/checkpoints/*")), "stored folders are removed"
    timings = [[line for line in two.events(node) if line.startswith("timing")] for node in (0, 1)]
    expected = [
        f"timing {rank} {step} {rank // 2} {seconds}"
        for step in range(1, 7)
        for rank, seconds in enumerate(in_collectives)
    ]
    assert [sorted(timings[0]), timings[1]] == [sorted(expected), []]
    assert [line for line in two.events(1) if line.startswith("step 2")] == [
        f"step 2 {step}" for step in range(1, 7)
    ]
    assert (two.folder / "node-1/logs/rank-00003.err").exists()
    environment = json.loads((two.folder / "node-0/output/environment.json").read_text())
    assert environment[NAME] == "max_split_size_mb:64,expandable_segments:True"


@pytest.mark.slow
def test_an_error_of_a_rank_is_shown_instead_of_the_broken_collective_of_its_peer(gang: NewGang) -> None:
    two = gang(nodes=2, engine="Gloo", orders={"do": "raise", "at": 1, "ranks": [1]}).start_all()
    for node in (0, 1):
        end = two.end(node, within=240)
        assert end["error"] == "RankFailed"
        assert "rank 1" in end["message"]
        assert "the loss is not a number" in end["message"]
        sums = two.folder / f"node-{node}/output/sum-{node}"
        assert sums.read_text() == "3.0", "the collective before the failure ran over both nodes"
    two.wait_until_ended(within=60)
