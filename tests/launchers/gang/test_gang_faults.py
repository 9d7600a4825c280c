"""However a node, an agent or a rank ends: all nodes end soon, with its cause, and nothing is left."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from launchers.store.bundles import LocalStorage
from launchers.store.checkpoints import CheckpointStore
from tests.launchers.gang.conftest import Gang

NewGang = Callable[..., Gang]
LONG = {"steps": 3000}
SLOW_NIGHTLY = [pytest.mark.slow, pytest.mark.nightly]
END_S = 120.0  # seconds: 5 to 8 where nothing else runs
# Process, moment and node of the kills; the last one is nightly
KILLS = [
    ("agent", "before its ranks run", 1),
    ("agent", "in the middle", 0),
    ("task", "in the middle", 1),
    ("task", "in a checkpoint", 0),
]


def ends(gang: Gang, *nodes: int, within: float = END_S) -> list[dict[str, Any]]:
    """Return how these nodes end, all within the limit; no process may be left."""
    deadline = time.monotonic() + within
    ends_of_nodes = [gang.end(node, within=max(0.1, deadline - time.monotonic())) for node in nodes]
    gang.wait_until_ended(within=60)
    return ends_of_nodes


def test_a_rank_that_raises_is_the_error_on_every_node_with_its_traceback(gang: NewGang) -> None:
    two = gang(nodes=2, orders={**LONG, "do": "raise", "at": 5, "ranks": [1]}).start_all()
    two.wait_for_step(4, rank=1)
    for end in ends(two, 0, 1):
        assert end["error"] == "RankFailed"
        assert "rank 1 on" in end["message"]
        assert "ValueError: the loss is not a number" in end["message"]
        assert "in inject_fault" in end["message"], "the traceback is there"


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "rank"), [(1, 1), pytest.param(2, 3, marks=pytest.mark.nightly)])
def test_kill_9_of_a_rank_ends_all_nodes_and_names_it(gang: NewGang, processes: int, rank: int) -> None:
    two = gang(nodes=2, processes=processes, orders={**LONG, "child": True}).start_all()
    for each in range(2 * processes):
        two.wait_for_step(2, rank=each)
    os.kill(two.rank_pid(rank), signal.SIGKILL)
    for end in ends(two, 0, 1):
        assert end["error"] == "RankFailed"
        assert f"rank {rank} on" in end["message"]
        assert "was ended by SIGKILL (9): often the kernel's out-of-memory killer" in end["message"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("who", "moment", "node"),
    [*KILLS[:-1], pytest.param(*KILLS[-1], marks=pytest.mark.nightly)],
)
def test_kill_9_of_an_agent_or_a_task_ends_all_nodes(gang: NewGang, who: str, moment: str, node: int) -> None:
    orders = {**LONG, "child": True}
    if moment == "in a checkpoint":
        orders |= {"every": 3, "checkpoint_s": 600}
    two = gang(nodes=2, orders=orders, store=True).start_all()
    if moment == "before its ranks run":
        two.wait_for(lambda: all(two.agent_pid(each) for each in (0, 1)))
    elif moment == "in the middle":
        two.wait_for_step(2, rank=0)
        two.wait_for_step(2, rank=1)
    else:
        two.wait_for(lambda: any("checkpoint" in line for line in two.events(node)))
    pid = two.tasks[node].pid if who == "task" else two.agent_pid(node)
    os.kill(pid, signal.SIGKILL)
    other = 1 - node
    if who == "task":
        (end,) = ends(two, other)
        assert end["error"] == "NodeLost"
        assert end["failure"]["node"] == node
        assert "connection broke without a goodbye" in end["message"]
    else:
        for end in ends(two, 0, 1):
            assert end["error"] == "RankFailed"
            assert f"the agent of node {node}" in end["message"]
            assert "SIGKILL (9)" in end["message"]
    assert not list(two.folder.glob(f"node-{other}/checkpoints/*")), "no half-written checkpoint is left"


@pytest.mark.slow
@pytest.mark.parametrize("node", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_a_node_that_falls_silent_ends_the_others_and_itself_when_it_continues(
    gang: NewGang, node: int
) -> None:
    """As after a broken network or a frozen machine: no connection is closed."""
    two = gang(nodes=2, orders={**LONG, "child": True}).start_all()
    for rank in (0, 1):
        two.wait_for_step(2, rank=rank)
    two.tasks[node].send_signal(signal.SIGSTOP)
    try:
        other = two.end(1 - node, within=END_S)
    finally:
        two.tasks[node].send_signal(signal.SIGCONT)
    assert other["error"] == "NodeLost"
    assert re.search(rf"node {node} \(\S+\) was lost: .* 10 s", other["message"])
    (continued,) = ends(two, node)
    assert continued["error"] == "NodeLost"


@pytest.mark.slow
def test_a_node_that_must_leave_during_a_checkpoint_makes_all_nodes_write_another(
    gang: NewGang,
) -> None:
    orders = {"steps": 500, "every": 4, "step_s": 1.0, "checkpoint_s": 0.5}
    two = gang(nodes=2, processes=2, store=True, grace_s=60, orders=orders).start_all()
    two.wait_for(lambda: "checkpoint 2 4" in two.events(1))
    two.tasks[1].send_signal(signal.SIGTERM)
    for end in ends(two, 0, 1):
        assert end["error"] == "NodeLeft", two.logs()
        assert re.search(r"node 1 \(\S+\) has to leave \(SIGTERM\); all have stopped", end["message"])
    store = CheckpointStore(LocalStorage(two.folder / "store"), "run/train")
    last, before = store.candidates()
    assert before.step == 4
    assert last.step in (5, 6, 7)  # before the next regular one
    assert f"the checkpoint of step {last.step} is stored" in end["message"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("grace_s", "orders", "error"),
    [
        pytest.param(60, {"every": 4}, "NodeLeft", id="has to leave"),
        pytest.param(0, {"do": "raise", "at": 3, "ranks": [1]}, "RankFailed", id="a rank fails"),
    ],
)
def test_a_node_that_is_terminated_while_it_ends_reports_why_the_gang_ended(
    gang: NewGang, grace_s: float, orders: dict[str, Any], error: str
) -> None:
    """A JobSet terminates the other pods as soon as one has ended. Rank 0 makes the end of node 0 last."""
    orders = {"steps": 500, "step_s": 0.5, "ignores_sigterm": [0], **orders}
    two = gang(nodes=2, store=True, grace_s=grace_s, timeouts={"grace": 8.0}, orders=orders).start_all()
    if grace_s:
        two.wait_for_step(2, rank=1)
        two.tasks[1].send_signal(signal.SIGTERM)
    first = two.end(1)
    assert two.tasks[0].poll() is None
    two.tasks[0].send_signal(signal.SIGTERM)
    (second,) = ends(two, 0)
    assert (second["error"], second["message"]) == (first["error"], first["message"]), two.logs()
    assert first["error"] == error


@pytest.mark.parametrize("how", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=SLOW_NIGHTLY)])
def test_a_signal_to_a_task_ends_its_processes_and_the_other_nodes(
    gang: NewGang, how: signal.Signals
) -> None:
    two = gang(nodes=2, orders={**LONG, "child": True}).start_all()
    two.wait_for_step(2, rank=0)
    two.tasks[0].send_signal(how)
    stopped, other = ends(two, 0, 1)
    assert stopped["error"] == ("SystemExit" if how == signal.SIGTERM else "KeyboardInterrupt")
    assert other["error"] == "NodeLost"
    assert "node 0" in other["message"]
    assert f"was stopped by {how.name if how == signal.SIGTERM else 'KeyboardInterrupt'}" in other["message"]


def test_a_full_disk_is_a_user_error_that_names_the_last_complete_checkpoint(gang: NewGang) -> None:
    orders = {**LONG, "do": "full", "at": 4, "every": 2, "step_s": 0.5}
    one = gang(orders=orders, store=True).start_all()
    (end,) = ends(one, 0, within=60)
    assert end["error"] == "UserError"
    assert "No space left" in end["message"]
    assert "step-00000099/half" in end["message"]
    assert "The last complete checkpoint is of step 2." in end["message"]
    assert not list(one.folder.glob("node-0/checkpoints/*"))
    assert CheckpointStore(LocalStorage(one.folder / "store"), "run/train").latest() is not None


@pytest.mark.slow
def test_a_checkpoint_that_all_nodes_have_finished_is_kept_although_the_run_fails(gang: NewGang) -> None:
    orders = {**LONG, "every": 4, "do": "raise", "at": 5, "step_s": 0.01}
    two = gang(nodes=2, orders=orders, store=True).start_all()
    ends(two, 0, 1, within=60)
    latest = CheckpointStore(LocalStorage(two.folder / "store"), "run/train").latest()
    assert latest is not None
    assert latest.step == 4


@pytest.mark.slow
def test_a_task_whose_scheduler_was_killed_ends_its_node_and_all_other_nodes(gang: NewGang) -> None:
    two = gang(nodes=2, orders={**LONG, "child": True})
    two.start(0)
    scheduler = two.start(1, forwarded_port=("sh", "-c", '"$@" & wait', "sh"))
    two.wait_for_step(2, rank=1)
    scheduler.kill()
    (end,) = ends(two, 0)
    assert end["error"] == "NodeLost"
    assert "node 1" in end["message"]
    assert "the process that started its task" in end["message"]
