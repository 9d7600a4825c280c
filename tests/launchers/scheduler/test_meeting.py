"""The nodes of a job meet: what each says is heard, and a failure of one is everybody's."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from estimator.errors import UserError
from launchers.cluster.channel import NodeAddress
from launchers.gang.failures import GangFailed, NodeLost
from launchers.scheduler.meeting import ElsewhereError, Meeting

Part = Callable[[], Any]


def address(node: int, nodes: int, port: int, token: str = "t") -> NodeAddress:  # noqa: S107
    return NodeAddress(node=node, nodes=nodes, main_host="127.0.0.1", ports=(port,), token=token)


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def together(*parts: Part) -> list[Any]:
    """Run the nodes' parts at once; what each returns or raises."""
    found: list[Any] = [None] * len(parts)

    def one(index: int, part: Part) -> None:
        try:
            found[index] = part()
        except BaseException as error:  # noqa: BLE001 it is what the test looks at
            found[index] = error

    threads = [threading.Thread(target=one, args=item, daemon=True) for item in enumerate(parts)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


def test_node_0_hears_all_and_all_hear_node_0(port: int) -> None:
    def lead() -> Any:
        with Meeting(address(0, 3, port)) as meeting:
            heard = meeting.gather({"from": 0}, 30)
            meeting.say({"answer": 42})
            meeting.gather({}, 30)
        return heard

    def follow(node: int) -> Any:
        with Meeting(address(node, 3, port)) as meeting:
            meeting.say({"from": node})
            heard = meeting.hear(30)
            meeting.say({})
            time.sleep(0.2)
        return heard

    heard = together(lead, lambda: follow(1), lambda: follow(2))
    assert heard == [[{"from": 0}, {"from": 1}, {"from": 2}], {"answer": 42}, {"answer": 42}]


def test_a_mistake_found_by_one_node_is_raised_on_all(port: int) -> None:
    def lead() -> None:
        with Meeting(address(0, 3, port)) as meeting:
            meeting.gather({}, 30)

    def follow(node: int) -> None:
        with Meeting(address(node, 3, port)) as meeting:
            if node == 1:
                raise UserError("h1 does not see the folder.", "Share it.")
            meeting.say({})
            meeting.hear(30)

    first, second, third = together(lead, lambda: follow(1), lambda: follow(2))
    assert type(second) is UserError
    for error in (first, third):
        assert isinstance(error, ElsewhereError)
        assert (error.problem, error.advice) == ("h1 does not see the folder.", "Share it.")


def test_a_node_that_does_not_come_is_named(port: int) -> None:
    with pytest.raises(GangFailed, match=r"node 1, 2 did not come within 1 s \(1 of 3 were there\)"):
        Meeting(address(0, 3, port), come_s=1.0)
    with pytest.raises(NodeLost, match="could not be reached within 1 s"):
        Meeting(address(1, 3, port), come_s=1.0)


def test_all_that_are_there_hear_which_node_did_not_come(port: int) -> None:
    def follow() -> None:
        with Meeting(address(1, 3, port)) as meeting:
            meeting.hear(60)

    first, second = together(lambda: Meeting(address(0, 3, port), come_s=3.0), follow)
    for error in (first, second):
        assert isinstance(error, GangFailed)
        assert "node 2 did not come within 3 s (2 of 3 were there)" in str(error)


def test_all_hear_which_node_was_lost(port: int) -> None:
    def lead() -> None:
        with Meeting(address(0, 3, port)) as meeting:
            meeting.gather({}, 30)

    def leave() -> None:
        with Meeting(address(1, 3, port)):
            pass

    def follow() -> None:
        with Meeting(address(2, 3, port)) as meeting:
            meeting.hear(60)

    first, _, third = together(lead, leave, follow)
    for error in (first, third):
        assert isinstance(error, NodeLost)
        assert error.failure.node == 1


def test_a_node_0_that_goes_away_is_noticed_at_once(port: int) -> None:
    def lead() -> None:
        with Meeting(address(0, 2, port)):
            pass

    def follow() -> None:
        with Meeting(address(1, 2, port)) as meeting:
            meeting.hear(60)

    began = time.monotonic()
    _, error = together(lead, follow)
    assert isinstance(error, NodeLost)
    assert time.monotonic() - began < 50


def test_a_stranger_is_not_taken_in(port: int) -> None:
    def lead() -> Any:
        with Meeting(address(0, 2, port), come_s=20) as meeting:
            return meeting.gather({}, 30)

    def stranger() -> None:
        Meeting(address(1, 2, port, token="other"), come_s=2)

    def member() -> None:
        time.sleep(3)
        with Meeting(address(1, 2, port)) as meeting:
            meeting.say({"from": "member"})
            time.sleep(0.5)

    heard, refused, _ = together(lead, stranger, member)
    assert heard == [{}, {"from": "member"}]
    assert isinstance(refused, NodeLost)


def test_silence_has_a_limit(port: int) -> None:
    def lead() -> None:
        with Meeting(address(0, 2, port)) as meeting:
            meeting.gather({}, 1.0)

    def follow() -> None:
        with Meeting(address(1, 2, port)):
            time.sleep(3)

    error, _ = together(lead, follow)
    assert isinstance(error, NodeLost)
    assert "did not answer within" in str(error)


def test_one_node_meets_nobody() -> None:
    alone = NodeAddress(node=0, nodes=1, main_host="127.0.0.1", ports=(), token="t")
    with Meeting(alone) as meeting:
        meeting.say({})
        assert meeting.gather({"own": 1}, 1.0) == [{"own": 1}]
