"""The control channel on its own, without ranks."""

from __future__ import annotations

import socket

from launchers.cluster.endpoint import NodeAddress, Secret
from launchers.gang.control import Timeouts
from launchers.gang.hub import Hub


def test_a_hub_that_is_closed_gives_its_port_back_at_once() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    address = NodeAddress(node=0, nodes=2, main_host="127.0.0.1", ports=(port,), secret=Secret("s"), run="r")
    for _ in range(2):  # the second is refused where the first one's thread still listens
        Hub(address, Timeouts()).close()
