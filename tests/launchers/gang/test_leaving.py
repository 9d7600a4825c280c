"""All ranks write a checkpoint after the same step, although they are notified between different steps."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from launchers.cluster.endpoint import NodeAddress, Secret
from launchers.gang import leaving
from launchers.gang.control import Stopped, Timeouts
from launchers.gang.hub import Hub
from launchers.gang.leaving import Cadence, folder_of
from launchers.gang.rank import RankEnv, write_atomically
from tests.launchers.gang.conftest import make_job

ALONE = NodeAddress(node=0, nodes=1, main_host="127.0.0.1", ports=(), secret=Secret(""), run="r")


def rank(number: int) -> RankEnv:
    return RankEnv(rank=number, local_rank=number, world_size=2, local_world_size=2, node=0)


def test_a_rank_without_a_stop_request_writes_checkpoints_at_its_interval_only(tmp_path: Path) -> None:
    cadence = Cadence(make_job(tmp_path, steps=12, every=4), rank(0))
    assert [step for step in range(1, 13) if cadence.writes_after(step)] == [4, 8]
    cadence.finish(4)


def test_a_rank_waits_for_the_final_step_number_and_trains_until_it(tmp_path: Path) -> None:
    job = make_job(tmp_path, steps=12, every=0)
    cadence, expected_steps = Cadence(job, rank(1)), list[int]()
    write_atomically(folder_of(tmp_path) / "asked", "node 0 has to go")
    steps = threading.Thread(
        target=lambda: expected_steps.extend(step for step in (5, 6, 7) if cadence.writes_after(step))
    )
    steps.start()
    steps.join(0.2)
    assert steps.is_alive(), "it waits for the choice"
    assert (folder_of(tmp_path) / "rank-00001.json").read_text() == "5"
    write_atomically(folder_of(tmp_path) / "step", "7")
    steps.join(10)
    assert expected_steps == [7]


def test_a_rank_continues_if_no_final_step_is_decided(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leaving, "DECISION_S", 0.05)
    cadence = Cadence(make_job(tmp_path, steps=12, every=6), rank(0))
    write_atomically(folder_of(tmp_path) / "asked", "node 0 has to go")
    assert [step for step in (5, 6) if cadence.writes_after(step)] == [6]


@pytest.mark.parametrize(("all_ranks", "last"), [(True, 5), (False, 6)])
def test_the_final_step_is_a_step_that_no_rank_has_passed(all_ranks: bool, last: int) -> None:
    hub = Hub(ALONE, Timeouts(settle=0.05))
    assert hub.last_step() is None
    hub.report(Stopped(step=5, all=all_ranks))
    if not all_ranks:
        assert hub.last_step() is None, "others may say how far they are"
        threading.Event().wait(0.1)
    assert hub.last_step() == last
    hub.report(Stopped(step=9, all=True))
    assert hub.last_step() == last, "it is chosen once"
    hub.close()
