"""The control channel alone, without ranks."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import re
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from estimator.errors import UserError
from launchers.cluster.endpoint import CLUSTER_PORTS, STORE_PORTS, NodeAddress, Secret, unused_port
from launchers.gang import hub
from launchers.gang.control import Control, Done, Failed, PartStored, Timeouts, format_nodes
from launchers.gang.failures import Failure, GangFailed, NodeLost
from launchers.gang.hub import Hub
from launchers.gang.member import Member

QUICK = Timeouts(settle=0.3, lost_after=3.0)


def _address(port: int, node: int = 0, nodes: int = 2, join_timeout_s: float = 300.0) -> NodeAddress:
    return NodeAddress(
        node=node,
        nodes=nodes,
        main_host="127.0.0.1",
        ports=(port,),
        secret=Secret("s"),
        run="r",
        join_timeout_s=join_timeout_s,
    )


def failure(message: str, *, secondary: bool = False, node: int = 0, at: float = 1.0) -> Failure:
    return Failure(kind="rank", node=node, host="h", at=at, message=message, secondary=secondary)


def outcome(call: Callable[[], object]) -> object:
    """Return the result or the exception of a call."""
    try:
        return call()
    except Exception as error:  # noqa: BLE001 the test looks at it
        return error


def joined(main: Hub, member: Member) -> list[object]:
    """Return the outcomes of joining of both nodes."""
    with ThreadPoolExecutor() as pool:
        return list(pool.map(outcome, (main.join, member.join)))


@pytest.fixture
def port() -> int:
    return unused_port()


def test_a_closed_hub_releases_its_port_at_once(port: int) -> None:
    for _ in range(2):  # the second is refused where the first one's thread still listens
        Hub(_address(port), Timeouts()).close()


def test_a_joining_node_restarts_the_join_timeout_and_missing_nodes_are_named(
    port: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(hub, "_LOG_INTERVAL_S", 0.5)
    join_timeout_s, late_s = 1.5, 1.0

    def join_late() -> None:
        time.sleep(late_s)
        member = Member(_address(port, 1, 3, join_timeout_s), Timeouts())
        with pytest.raises(GangFailed, match="node 2 did not join"):
            member.join()
        member.close()

    late = threading.Thread(target=join_late)
    main = Hub(_address(port, 0, 3, join_timeout_s), Timeouts())
    begin = time.monotonic()
    late.start()
    try:
        with (
            caplog.at_level(logging.WARNING),
            pytest.raises(GangFailed, match=re.escape("node 2 did not join within 1.5 s (2 of 3 joined)")),
        ):
            main.join()
        assert time.monotonic() - begin >= late_s + join_timeout_s
        waiting = "waiting for node 1, 2: 1 of 3 have joined after 0 min"
        assert caplog.messages[0] == f"{waiting}; the wait ends 0.025 min after the last join"
        assert "waiting for node 2: 2 of 3 have joined" in caplog.messages[-1]
        assert len(caplog.messages) <= (time.monotonic() - begin) / hub._LOG_INTERVAL_S
    finally:
        late.join(timeout=30)
        main.close()


def test_nodes_that_restored_different_checkpoints_do_not_train(port: int) -> None:
    main, member = Hub(_address(port), QUICK, 10), Member(_address(port, 1), QUICK, 20)
    with contextlib.closing(main), contextlib.closing(member):
        for error in joined(main, member):
            assert type(error) is GangFailed
            assert "would resume from step 20, node 0 from step 10" in str(error)


def test_a_node_lost_while_others_have_not_joined_ends_the_wait(port: int) -> None:
    main, member = Hub(_address(port, nodes=3), QUICK), Member(_address(port, 1, 3), QUICK)
    with contextlib.closing(main), ThreadPoolExecutor() as pool:
        waiting = [pool.submit(outcome, node.join) for node in (main, member)]
        deadline = time.monotonic() + 20
        while 1 not in main._hosts and time.monotonic() < deadline:
            time.sleep(0.01)
        main._server.peers()[1].connection._socket.shutdown(socket.SHUT_RDWR)
        error = waiting[0].result(20)
        assert isinstance(error, NodeLost)
        assert error.failure.node == 1
        assert isinstance(waiting[1].result(20), GangFailed)


def within(control: Control, seconds: float = 10.0) -> Failure | None:
    """Wait for the verdict and return its failure."""
    deadline = time.monotonic() + seconds
    while (verdict := control.verdict()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return verdict.failure


def test_all_nodes_receive_one_verdict_that_prefers_the_cause_over_consequences(port: int) -> None:
    main, member = Hub(_address(port), QUICK), Member(_address(port, 1), QUICK)
    with contextlib.closing(main), contextlib.closing(member):
        ports = joined(main, member)
        assert ports[0] == ports[1]
        assert main.verdict() is member.verdict() is None
        begin = time.monotonic()
        main.report(Failed(failure=failure("closed by peer", secondary=True)))
        time.sleep(QUICK.settle * 1.5)
        assert main.verdict() is None, "a consequence waits twice as long for its cause"
        member.report(Failed(failure=failure("the cause", node=1, at=2.0)))
        for node in (main, member):
            verdict = within(node)
            assert verdict is not None
            assert verdict.message == "the cause"
        assert time.monotonic() - begin < QUICK.lost_after


def test_a_run_succeeds_only_if_all_nodes_are_done_and_node_0_is_the_last(port: int) -> None:
    main, member = Hub(_address(port), QUICK), Member(_address(port, 1), QUICK)
    with contextlib.closing(main), contextlib.closing(member):
        joined(main, member)
        main.report(PartStored(step=4))
        assert (main.complete_steps(), main.parts_missing(), main.peers_done()) == ([], True, False)
        member.report(PartStored(step=4))
        member.report(Done())
        deadline = time.monotonic() + 20
        while not main._done and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not main.peers_done(), "a complete checkpoint is not committed yet"
        assert main.complete_steps() == [4]
        assert (main.complete_steps(), main.parts_missing(), main.peers_done()) == ([], False, True)
        assert main.verdict() is None
        main.report(Done())
        assert within(main) is within(member) is None


def test_a_node_that_leaves_is_not_lost_and_its_parts_are_not_waited_for(port: int) -> None:
    main, member = Hub(_address(port), QUICK), Member(_address(port, 1), QUICK)
    with contextlib.closing(main):
        joined(main, member)
        main.report(PartStored(step=4))
        assert main.parts_missing()
        member.close()
        deadline = time.monotonic() + 20
        while main.parts_missing():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(QUICK.settle * 3)  # within this time a lost node would be the verdict
        assert main.verdict() is None


def test_a_failure_of_a_single_node_is_reported_at_once_unless_it_is_a_consequence() -> None:
    alone = dataclasses.replace(_address(0), nodes=1)
    for secondary in (False, True):
        main = Hub(alone, Timeouts(settle=60.0))
        main.report(Failed(failure=failure("ended", secondary=secondary)))
        assert (main.verdict() is None) == secondary
        main.close()


def test_a_node_that_lost_node_0_reports_the_broken_connection(port: int) -> None:
    main, member = Hub(_address(port), QUICK), Member(_address(port, 1), QUICK)
    joined(main, member)
    for peer in main._server.peers().values():
        peer.connection._socket.shutdown(socket.SHUT_RDWR)
    with contextlib.closing(main), contextlib.closing(member):
        verdict = within(member)
        assert verdict is not None
        assert (verdict.kind, verdict.node) == ("node", 0)
        assert "connection broke without a goodbye" in verdict.message


def test_the_torch_store_on_a_cluster_uses_only_ports_opened_by_the_network_policy() -> None:
    on_cluster = dataclasses.replace(_address(0), ports=CLUSTER_PORTS)
    assert {hub.free_port(on_cluster) for _ in range(50)} <= set(STORE_PORTS)
    assert 20_000 <= hub.free_port(_address(29_400)) < 32_000
    with contextlib.ExitStack() as stack:
        for port in STORE_PORTS:
            stack.enter_context(socket.create_server(("127.0.0.1", port)))
        with pytest.raises(UserError, match="No free port between 29408 and 29439"):
            hub.free_port(on_cluster)


@pytest.mark.parametrize(("count", "omitted_text"), [(8, ""), (9, "1"), (20, "12")])
def test_the_first_eight_of_many_nodes_are_named_and_the_rest_counted(count: int, omitted_text: str) -> None:
    named, _, names_after = format_nodes(list(range(count))).partition(" and ")
    assert (named.split(", "), names_after.partition(" ")[0]) == (
        [str(node) for node in range(8)],
        omitted_text,
    )
