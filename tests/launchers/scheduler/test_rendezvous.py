"""Rendezvous of the nodes of a job: values are exchanged, and an error on one node is raised on all."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from estimator.errors import UserError
from launchers.cluster.allocation import Allocation
from launchers.cluster.endpoint import NodeAddress, Secret, unused_port
from launchers.gang.failures import GangFailed, NodeLost
from launchers.scheduler.rendezvous import RemoteUserError, Rendezvous, SecretFile, join
from tests.launchers.cluster.strangers import common, completes_greeting, repeated_attacks

Part = Callable[[], Any]


def address(node: int, nodes: int, port: int, secret: str = "s") -> NodeAddress:  # noqa: S107
    return NodeAddress(
        node=node, nodes=nodes, main_host="127.0.0.1", ports=(port,), secret=Secret(secret), run="r"
    )


@pytest.fixture
def port() -> int:
    return unused_port()


def together(*parts: Part) -> list[Any]:
    """Run the parts of nodes concurrently; return their results or exceptions."""
    results: list[Any] = [None] * len(parts)

    def one(index: int, part: Part) -> None:
        try:
            results[index] = part()
        except BaseException as error:  # noqa: BLE001 it is what the test looks at
            results[index] = error

    threads = [threading.Thread(target=one, args=item, daemon=True) for item in enumerate(parts)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


def gather_on_node_0(port: int, nodes: int, limit_s: float = 30) -> Any:
    """Run node 0, which gathers values from the others."""
    with Rendezvous(address(0, nodes, port), join_timeout_s=3.0) as rendezvous:
        return rendezvous.gather({}, limit_s)


def follow(node: int, port: int, nodes: int) -> Any:
    """Run another node, which waits for node 0 without sending anything."""
    with Rendezvous(address(node, nodes, port)) as rendezvous:
        return rendezvous.receive(60)


def test_node_0_receives_from_all_nodes_and_all_nodes_receive_from_node_0(port: int) -> None:
    def main() -> Any:
        with Rendezvous(address(0, 3, port)) as rendezvous:
            received = rendezvous.gather({"from": 0}, 30)
            rendezvous.send({"answer": 42})
            rendezvous.gather({}, 30)
        return received

    def other(node: int) -> Any:
        with Rendezvous(address(node, 3, port)) as rendezvous:
            rendezvous.send({"from": node})
            received = rendezvous.receive(30)
            rendezvous.send({})
            time.sleep(0.2)
        return received

    received = together(main, lambda: other(1), lambda: other(2))
    assert received == [[{"from": 0}, {"from": 1}, {"from": 2}], {"answer": 42}, {"answer": 42}]


def test_a_user_error_of_one_node_is_raised_on_all_nodes(port: int) -> None:
    def fail() -> None:
        with Rendezvous(address(1, 3, port)):
            raise UserError("h1 does not see the folder.", "Share it.")

    first, second, third = together(lambda: gather_on_node_0(port, 3), fail, lambda: follow(2, port, 3))
    assert type(second) is UserError
    for error in (first, third):
        assert isinstance(error, RemoteUserError)
        assert (error.problem, error.advice) == ("h1 does not see the folder.", "Share it.")


def test_a_node_that_does_not_join_is_named_on_all_joined_nodes(port: int) -> None:
    first, second = together(lambda: gather_on_node_0(port, 3), lambda: follow(1, port, 3))
    for error in (first, second):
        assert isinstance(error, GangFailed)
        assert "node 2 did not join within 3 s (2 of 3 joined)" in str(error)
    with pytest.raises(NodeLost, match="could not be reached within 1 s"):
        Rendezvous(address(1, 3, port), join_timeout_s=1.0)


def test_a_lost_node_is_named_on_all_nodes(port: int) -> None:
    def connect_and_leave() -> None:
        with Rendezvous(address(1, 3, port)):
            pass

    first, _, third = together(
        lambda: gather_on_node_0(port, 3), connect_and_leave, lambda: follow(2, port, 3)
    )
    for error in (first, third):
        assert isinstance(error, NodeLost)
        assert error.failure.node == 1


def test_the_loss_of_node_0_is_noticed_at_once(port: int) -> None:
    def connect_and_leave() -> None:
        with Rendezvous(address(0, 2, port)):
            pass

    began = time.monotonic()
    _, error = together(connect_and_leave, lambda: follow(1, port, 2))
    assert isinstance(error, NodeLost)
    assert time.monotonic() - began < 50


def test_a_silent_node_counts_as_lost_after_the_time_limit(port: int) -> None:
    def stay_silent() -> None:
        with Rendezvous(address(1, 2, port)):
            time.sleep(2)

    error, _ = together(lambda: gather_on_node_0(port, 2, 1.0), stay_silent)
    assert isinstance(error, NodeLost)
    assert "did not respond within" in str(error)


def test_a_single_node_needs_no_network() -> None:
    alone = NodeAddress(node=0, nodes=1, main_host="127.0.0.1", ports=(), secret=Secret(""), run="r")
    with Rendezvous(alone) as rendezvous:
        rendezvous.send({})
        assert rendezvous.gather({"own": 1}, 1.0) == [{"own": 1}]


def place(node: int, port: int, nodes: int = 2) -> Allocation:
    return Allocation(
        scheduler="pbs",
        job="4711[1].pbs",
        attempt="0",
        node=node,
        nodes=nodes,
        main_host="127.0.0.1",
        ports=(port,),
    )


def join_and_gather(node: int, port: int, folder: Path, *, after_s: float = 0.0) -> Any:
    time.sleep(after_s)
    with join(place(node, port), folder, 20) as rendezvous:
        if node > 0:
            rendezvous.send({"from": node})
            return rendezvous.receive(20)
        received = rendezvous.gather({"from": 0}, 20)
        file = next(folder.glob("rendezvous-*"))
        rendezvous.send({"mode": file.stat().st_mode & 0o777})
        time.sleep(0.5)
        return received


def test_the_rendezvous_secret_of_a_job_is_in_a_file_that_only_its_user_can_read(
    port: int, tmp_path: Path
) -> None:
    received, reported = together(
        lambda: join_and_gather(0, port, tmp_path, after_s=1.0), lambda: join_and_gather(1, port, tmp_path)
    )
    assert received == [{"from": 0}, {"from": 1}]
    assert reported == {"mode": 0o600}
    assert list(tmp_path.iterdir()) == [], "it goes with the rendezvous"


def test_a_secret_left_by_an_earlier_start_is_renewed(port: int, tmp_path: Path) -> None:
    SecretFile(tmp_path, place(0, port)).write()
    received, _ = together(
        lambda: join_and_gather(0, port, tmp_path, after_s=2.0), lambda: join_and_gather(1, port, tmp_path)
    )
    assert received == [{"from": 0}, {"from": 1}]


def test_a_node_that_does_not_see_the_folder_of_node_0_reports_it(port: int, tmp_path: Path) -> None:
    with (
        pytest.raises(UserError, match=r"rendezvous-4711_1_.pbs.0, .* is not visible on"),
        join(place(1, port), tmp_path, 1.0),
    ):
        pass


def test_a_secret_file_of_another_user_is_not_used(port: int, tmp_path: Path) -> None:
    file = SecretFile(tmp_path, place(1, port))
    (tmp_path / "other").write_text("known")
    file.path.symlink_to(tmp_path / "other")
    with pytest.raises(UserError, match="unusable"):
        file.read()
    file.path.unlink()
    if os.getuid() == 0:
        file.path.write_text("known")
        os.chown(file.path, 12345, -1)
        with pytest.raises(UserError, match="it belongs to user 12345"):
            file.read()


def test_unauthenticated_connections_do_not_delay_the_rendezvous(port: int) -> None:
    def join() -> None:
        time.sleep(1)
        with Rendezvous(address(1, 2, port)) as rendezvous:
            rendezvous.send({"from": 1})
            time.sleep(0.5)

    claim = b'{"node":1,"nodes":2,"host":"stranger"}'
    message_of_stranger = b'{"kind":"user_error","problem":"a stranger says so","advice":""}'
    with repeated_attacks([port], [*common(), completes_greeting("r", "", claim, message_of_stranger)]):
        received, _ = together(lambda: gather_on_node_0(port, 2), join)
    assert received == [{}, {"from": 1}]
