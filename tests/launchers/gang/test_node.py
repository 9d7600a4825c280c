"""Gangs that end well."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from launchers.store.bundles import LocalStorage
from launchers.store.checkpoints import CheckpointStore
from tests.launchers.gang.conftest import Gang

NewGang = Callable[..., Gang]


def test_one_process_on_one_node_runs_to_its_end_and_takes_along_what_it_has_started(gang: NewGang) -> None:
    one = gang(orders={"steps": 3, "child": True}).start_all()
    assert one.end(0)["stored"] == [], one.logs()
    assert [line for line in one.events(0) if line.startswith("step")] == [
        "step 0 1",
        "step 0 2",
        "step 0 3",
    ]
    one.gone(within=60)
    assert (one.folder / "node-0/logs/rank-00000.err").exists()


def test_two_nodes_with_two_ranks_each_store_checkpoints_as_one_unit_and_node_0_has_the_pace_of_all(
    gang: NewGang,
) -> None:
    in_collectives = (0.5, 0.25, 0.125, 0.0)
    orders = {"steps": 6, "every": 2, "step_s": 0.3, "in_collectives": in_collectives}
    two = gang(nodes=2, processes=2, store=True, orders=orders).start_all()
    for node in (0, 1):
        assert two.end(node)["stored"] == [2, 4, 6], two.logs()
    two.gone(within=60)
    store = CheckpointStore(LocalStorage(two.folder / "store"), "run/train")
    assert [checkpoint.step for checkpoint in store.candidates()] == [6, 4]
    restored = two.folder / "restored"
    store.restore(next(store.candidates()), restored)
    assert sorted(path.name for path in restored.iterdir()) == [
        *(f"rank-{rank:05d}.json" for rank in range(4)),
        *(f"state-{rank}.bin" for rank in range(4)),
    ]
    assert not list(two.folder.glob("node-*/checkpoints/*")), "stored folders are removed"
    paces = [[line for line in two.events(node) if line.startswith("pace")] for node in (0, 1)]
    expected = [
        f"pace {rank} {step} {rank // 2} {seconds}"
        for step in range(1, 7)
        for rank, seconds in enumerate(in_collectives)
    ]
    assert [sorted(paces[0]), paces[1]] == [sorted(expected), []]


@pytest.mark.slow
@pytest.mark.nightly
def test_a_node_that_has_finished_waits_for_one_that_has_not(gang: NewGang) -> None:
    two = gang(nodes=2, orders={"steps": 3, "do": "nap", "at": 3, "ranks": [1], "nap_s": 3}).start_all()
    assert "error" not in two.end(0), two.logs()
    assert "step 1 3" in two.events(1), "node 0 has ended after the last step of node 1"
    assert "error" not in two.end(1)
    two.gone(within=60)


@pytest.mark.slow
def test_a_real_collective_runs_over_two_nodes(gang: NewGang) -> None:
    two = gang(nodes=2, engine="Gloo").start_all()
    for node in (0, 1):
        assert "error" not in two.end(node, within=240), two.logs()
        assert (two.folder / f"node-{node}/output/sum-{node}").read_text() == "3.0"
    two.gone(within=60)


@pytest.mark.slow
def test_the_cause_is_shown_and_not_the_broken_collective_of_its_peer(gang: NewGang) -> None:
    two = gang(nodes=2, engine="Gloo", orders={"do": "raise", "at": 1, "ranks": [1]}).start_all()
    for node in (0, 1):
        end = two.end(node, within=240)
        assert end["error"] == "RankFailed"
        assert "rank 1" in end["message"]
        assert "the loss is not a number" in end["message"]
    two.gone(within=60)
