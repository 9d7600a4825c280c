"""The control channel on its own, without ranks."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import re
import socket
import threading
import time

import pytest

from estimator.errors import UserError
from launchers.cluster.endpoint import CLUSTER_PORTS, STORE_PORTS, NodeAddress, Secret
from launchers.gang import hub
from launchers.gang.control import Timeouts, some
from launchers.gang.failures import GangFailed
from launchers.gang.hub import Hub
from launchers.gang.member import Member


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


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_hub_that_is_closed_gives_its_port_back_at_once(port: int) -> None:
    for _ in range(2):  # the second is refused where the first one's thread still listens
        Hub(_address(port), Timeouts()).close()


def test_a_node_that_comes_gives_the_others_time_anew_and_who_is_missing_is_told(
    port: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(hub, "_LOG_INTERVAL_S", 0.5)
    join_timeout_s, late_s = 1.5, 1.0

    def come_late() -> None:
        time.sleep(late_s)
        member = Member(_address(port, 1, 3, join_timeout_s), Timeouts())
        with pytest.raises(GangFailed, match="node 2 did not join"):
            member.join()
        member.close()

    late = threading.Thread(target=come_late)
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
        assert "waiting for node 1, 2: 1 of 3 have joined after 0 min" in caplog.messages[0]
        assert "waiting for node 2: 2 of 3 have joined" in caplog.messages[-1]
    finally:
        late.join(timeout=30)
        main.close()


def test_torchs_store_on_a_cluster_takes_only_ports_that_the_network_policy_opens() -> None:
    on_cluster = dataclasses.replace(_address(0), ports=CLUSTER_PORTS)
    assert {hub.free_port(on_cluster) for _ in range(50)} <= set(STORE_PORTS)
    assert 20_000 <= hub.free_port(_address(29_400)) < 32_000
    with contextlib.ExitStack() as stack:
        for port in STORE_PORTS:
            stack.enter_context(socket.create_server(("127.0.0.1", port)))
        with pytest.raises(UserError, match="No free port between 29408 and 29439"):
            hub.free_port(on_cluster)


@pytest.mark.parametrize(("count", "more"), [(8, ""), (9, "1"), (20, "12")])
def test_of_many_nodes_the_first_eight_are_named_and_the_rest_counted(count: int, more: str) -> None:
    named, _, rest = some(list(range(count))).partition(" and ")
    assert (named.split(", "), rest.partition(" ")[0]) == ([str(node) for node in range(8)], more)
