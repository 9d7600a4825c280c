"""Runs of two nodes while unknown clients connect, and a rejoining node that is refused."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from estimator.errors import UserError
from launchers.cluster.endpoint import NodeAddress, Secret
from launchers.gang.control import Timeouts
from launchers.gang.member import Member
from launchers.store.bundles import LocalStorage
from launchers.store.checkpoints import CheckpointStore
from tests.launchers.cluster.strangers import common, completes_greeting, forwarded_port, repeated_attacks
from tests.launchers.gang.conftest import RUN, SECRET, Gang
from tests.launchers.gang.test_gang_faults import ends

NewGang = Callable[..., Gang]
CLAIM = b'{"node":1,"nodes":2,"host":"stranger","start_step":0}'
FAILURE = b'{"kind":"user","node":1,"host":"stranger","at":0,"message":"a stranger says so"}'
FAILED = b'{"kind":"failed","failure":' + FAILURE + b"}"


@pytest.mark.slow
def test_a_run_ends_normally_if_unknown_clients_connect(gang: NewGang) -> None:
    two = gang(nodes=2, orders={"steps": 20, "every": 5}, store=True)
    forged = [
        completes_greeting(RUN, "", CLAIM, FAILED),  # the run's name alone, which is to be read in ps
        completes_greeting(RUN, "guessed", CLAIM, b'{"kind":"part_stored","step":5}'),
        completes_greeting(RUN, "guessed", CLAIM, b'{"kind":"done"}'),
    ]
    with repeated_attacks(two.ports, [*common(), *forged]) as tried:
        two.start(0)
        time.sleep(2)  # the strangers are there first
        begin = time.monotonic()
        two.start(1)
        ends_of_nodes = [two.end(node, within=120) for node in (0, 1)]
        seconds = time.monotonic() - begin
        assert tried() > 300
    assert [end.get("error") for end in ends_of_nodes] == [None, None], two.logs()
    latest = CheckpointStore(LocalStorage(two.folder / "store"), "run/train").latest()
    assert latest is not None
    assert latest.step == 20
    log = two.logs()
    assert "Traceback" not in log
    assert "a stranger says" not in log
    print(f"strangers called {tried():,} times; the run took {seconds:.1f} s")


@pytest.mark.slow
def test_a_disconnected_node_is_reported_lost_and_a_second_node_of_its_number_is_refused(
    gang: NewGang,
) -> None:
    two = gang(nodes=2, orders={"steps": 3000})
    two.start(0)
    ports = two.ports
    with forwarded_port(ports[0]) as (port, cut):
        two.ports = [port]
        two.start(1)
        two.wait_for_step(3, rank=1)
        rejoining = Member(
            NodeAddress(
                node=1,
                nodes=2,
                main_host="127.0.0.1",
                ports=tuple(ports),
                secret=Secret(SECRET),
                run=RUN,
                join_timeout_s=10.0,
            ),
            Timeouts(),
        )
        with pytest.raises(UserError) as caught:
            rejoining.join()
        assert str(caught.value) == "Node 0 refused this node: node 1 of 2 is not expected (any more)."
        two.wait_for_step(8, rank=1)  # the run goes on
        begin = time.monotonic()
        cut()
        for end in ends(two, 0, 1):
            assert end["error"] == "NodeLost"
            assert "connection broke without a goodbye" in end["message"]
        print(f"both nodes ended {time.monotonic() - begin:.1f} s after the cut")
