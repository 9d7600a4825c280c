"""However a node, an agent or a rank ends: all nodes end soon, with its cause, and nothing is left."""

from __future__ import annotations

import itertools
import os
import re
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launchers.store.bundles import LocalStorage
from launchers.store.checkpoints import CheckpointStore
from tests.launchers.gang.conftest import Gang

NewGang = Callable[..., Gang]
LONG = {"steps": 3000}
SLOW_NIGHTLY = [pytest.mark.slow, pytest.mark.nightly]
END_S = 120.0  # seconds: 5 to 8 where nothing else runs
# Process, moment and node of the kills in the slow tier; all other combinations are nightly
KILLS = [
    ("agent", "before its ranks run", 1),
    ("agent", "in the middle", 0),
    ("task", "in the middle", 1),
]


def ends(gang: Gang, *nodes: int, within: float = END_S) -> list[dict[str, Any]]:
    """How these nodes end, all within the limit from now; then no process is left."""
    deadline = time.monotonic() + within
    found = [gang.end(node, within=max(0.1, deadline - time.monotonic())) for node in nodes]
    gang.gone(within=60)
    return found


def test_a_rank_that_raises_is_the_error_on_every_node_with_its_traceback(gang: NewGang) -> None:
    two = gang(nodes=2, orders={**LONG, "do": "raise", "at": 5, "ranks": [1]}).start_all()
    two.wait_for_step(4, rank=1)
    for end in ends(two, 0, 1):
        assert end["error"] == "RankFailed"
        assert "rank 1 on" in end["message"]
        assert "ValueError: the loss is not a number" in end["message"]
        assert "in misbehave" in end["message"], "the traceback is there"


@pytest.mark.slow
def test_a_users_mistake_found_by_a_rank_is_a_user_error_on_every_node(gang: NewGang) -> None:
    two = gang(nodes=2, orders={**LONG, "do": "user", "at": 1, "ranks": [1]}).start_all()
    for end in ends(two, 0, 1, within=90):
        assert end["error"] == "UserError"
        assert end["message"] == "Line 7 of data.jsonl is broken.\nMend it."


@pytest.mark.parametrize(
    ("processes", "rank"), [(1, 1), *(pytest.param(2, rank, marks=SLOW_NIGHTLY) for rank in (0, 1, 3))]
)
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
    [
        pytest.param(*case, marks=[] if case in KILLS else pytest.mark.nightly)
        for case in itertools.product(
            ("agent", "task"), ("before its ranks run", "in the middle", "in a checkpoint"), (0, 1)
        )
    ],
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
@pytest.mark.nightly
def test_a_stopped_task_is_found_by_its_silence_and_ends_when_it_goes_on(gang: NewGang) -> None:
    two = gang(nodes=2, orders=LONG, timeouts={"lost_after": 4.0}).start_all()
    two.wait_for_step(2, rank=1)
    os.kill(two.tasks[1].pid, signal.SIGSTOP)
    end = two.end(0, within=END_S)
    assert end["error"] == "NodeLost"
    assert end["failure"]["node"] == 1
    assert "sent nothing for 4 s" in end["message"]
    os.kill(two.tasks[1].pid, signal.SIGCONT)
    (end,) = ends(two, 1)
    assert end["error"] in ("NodeLost", "RankFailed")


@pytest.mark.slow
def test_a_node_that_has_to_go_while_a_checkpoint_is_written_is_followed_by_one_more_of_all_nodes(
    gang: NewGang,
) -> None:
    orders = {"steps": 500, "every": 4, "step_s": 0.3, "checkpoint_s": 0.5}
    two = gang(nodes=2, processes=2, store=True, grace_s=60, orders=orders).start_all()
    two.wait_for(lambda: "checkpoint 2 4" in two.events(1))
    two.tasks[1].send_signal(signal.SIGTERM)
    for end in ends(two, 0, 1):
        assert end["error"] == "NodeLeft", two.logs()
        assert re.search(r"node 1 \(\S+\) has to leave \(SIGTERM\); all have stopped", end["message"])
    store = CheckpointStore(LocalStorage(two.folder / "store"), "run/train")
    last, before = store.candidates()
    assert before.step == 4
    assert last.step in (5, 6)
    assert f"the checkpoint of step {last.step} is stored" in end["message"]


@pytest.mark.slow
@pytest.mark.nightly
def test_a_node_that_has_to_go_within_a_long_step_goes_without_a_checkpoint(gang: NewGang) -> None:
    orders = {**LONG, "do": "hang", "at": 3}
    one = gang(store=True, grace_s=3, orders=orders).start_all()
    one.wait_for_step(2)
    one.tasks[0].send_signal(signal.SIGTERM)
    (end,) = ends(one, 0)
    assert end["error"] == "SystemExit"


@pytest.mark.parametrize("how", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=SLOW_NIGHTLY)])
def test_a_task_that_is_told_to_stop_ends_its_processes_and_the_other_nodes(
    gang: NewGang, how: signal.Signals
) -> None:
    two = gang(nodes=2, orders={**LONG, "child": True}).start_all()
    two.wait_for_step(2, rank=0)
    two.tasks[0].send_signal(how)
    stopped, other = ends(two, 0, 1)
    assert stopped["error"] == ("SystemExit" if how == signal.SIGTERM else "KeyboardInterrupt")
    assert other["error"] == "NodeLost"
    assert "node 0" in other["message"]
    assert "was stopped by" in other["message"]


@pytest.mark.slow
def test_a_hanging_rank_is_named_with_its_last_sign(gang: NewGang) -> None:
    orders = {**LONG, "do": "hang", "at": 3, "ranks": [1], "hang_timeout_s": 6}
    two = gang(nodes=2, orders=orders).start_all()
    two.wait_for_step(2, rank=1)
    for end in ends(two, 0, 1):
        assert end["error"] == "RankHung"
        assert "rank 1 on" in end["message"]
        assert "its last sign: step 2" in end["message"]


@pytest.mark.slow
@pytest.mark.nightly
def test_a_consequence_that_comes_first_does_not_hide_the_cause(gang: NewGang) -> None:
    """Rank 0 says "connection closed" at the same step at which rank 1 is killed."""
    two = gang(nodes=2, orders={**LONG, "do": "reset", "at": 6, "ranks": [0]}).start_all()
    two.wait_for_step(5, rank=0)
    os.kill(two.rank_pid(1), signal.SIGKILL)
    for end in ends(two, 0, 1):
        assert "rank 1 on" in end["message"]
        assert "SIGKILL" in end["message"]


def test_a_rank_that_leaves_with_a_code_is_named_with_the_end_of_its_log(gang: NewGang) -> None:
    one = gang(orders={**LONG, "do": "exit", "at": 2}).start_all()
    (end,) = ends(one, 0, within=60)
    assert "rank 0 on" in end["message"]
    assert "ended with exit code 3 before the end of training" in end["message"]


def test_a_full_disk_is_the_users_to_mend_and_names_the_last_whole_checkpoint(gang: NewGang) -> None:
    orders = {**LONG, "do": "full", "at": 20, "every": 4, "step_s": 0.3}
    one = gang(orders=orders, store=True).start_all()
    (end,) = ends(one, 0, within=60)
    assert end["error"] == "UserError"
    assert "No space left" in end["message"]
    assert "step-00000099/half" in end["message"]
    assert "The last complete checkpoint is of step 16." in end["message"]
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
@pytest.mark.nightly
def test_strangers_on_the_first_ports_are_passed_by(gang: NewGang) -> None:
    two = gang(nodes=2, orders={"steps": 2})
    with socket.socket() as mute:  # accepts and says nothing
        mute.bind(("127.0.0.1", two.ports[0]))
        mute.listen()
        two.start_all()
        for end in ends(two, 0, 1, within=60):
            assert "error" not in end, two.logs()


@pytest.mark.slow
@pytest.mark.nightly
def test_two_gangs_on_the_same_ports_do_not_mix(gang: NewGang) -> None:
    first = gang(nodes=2, orders={"steps": 2})
    second = gang(nodes=2, orders={"steps": 2}, ports=first.ports)
    for each, run in ((first, "run 1"), (second, "run 2")):
        for node in (0, 1):
            each.start(node, run=run)
    for each in (first, second):
        for end in ends(each, 0, 1, within=90):
            assert "error" not in end, each.logs()


def test_a_node_of_another_attempt_is_not_taken_in(gang: NewGang) -> None:
    two = gang(nodes=2, join_timeout_s=5.0)
    two.start(0, run="run 1")
    two.start(1, run="run 2")
    main, other = ends(two, 0, 1)
    assert main["error"] == other["error"] == "NodeLost"
    assert "node 1 did not join within 5 s" in main["message"]
    assert "another run listens there, or one with another secret" in other["message"]


def is_connected(ports: list[int]) -> bool:
    """Whether somebody has a connection to one of these ports."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    established = {int(row[1].split(":")[1], 16) for row in rows if row[3] == "01"}
    return bool(established & set(ports))


@pytest.mark.slow
def test_a_node_that_dies_while_others_are_awaited_ends_the_wait(gang: NewGang) -> None:
    three = gang(nodes=3)
    for node in (0, 1):
        three.start(node)
    three.wait_for(lambda: is_connected(three.ports))
    time.sleep(2)  # to be greeted
    three.tasks[1].kill()
    (end,) = ends(three, 0)
    assert end["error"] == "NodeLost"
    assert end["failure"]["node"] == 1


@pytest.mark.slow
def test_a_task_whose_scheduler_was_killed_ends_its_node_and_the_others(gang: NewGang) -> None:
    two = gang(nodes=2, orders={**LONG, "child": True})
    two.start(0)
    scheduler = two.start(1, through=("sh", "-c", '"$@" & wait', "sh"))
    two.wait_for_step(2, rank=1)
    scheduler.kill()
    (end,) = ends(two, 0)
    assert end["error"] == "NodeLost"
    assert "node 1" in end["message"]
    assert "the process that started its task" in end["message"]


def test_nodes_that_restored_different_checkpoints_do_not_train(gang: NewGang) -> None:
    two = gang(nodes=2, orders=LONG, start_steps={0: 10, 1: 20}).start_all()
    for end in ends(two, 0, 1):
        assert end["error"] == "GangFailed"
        assert "would resume from step 20, node 0 from step 10" in end["message"]
