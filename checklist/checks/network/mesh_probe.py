"""Phase 1: connections and transfers of 256 KB between all pairs of nodes over plain sockets, in seconds.

A cut pair fails to connect. If the MTU is too large for the path, small packets pass, so the connection
succeeds but the 256 KB do not arrive.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from checklist.checks.network.sockets import Sink, deliver
from checklist.measurements import Probe, to_dict
from checklist.probing.context import Context

BULK_BYTES = 256 << 10
PINGS = 10  # round trips of an empty message, of which the shortest counts
_AT_ONCE = 16  # concurrent probes per node; its processor limits more


def listen(context: Context, address: str) -> int:
    """Listen on ``address`` for transfers; return the port."""
    sink = context.stored.get("sink")
    if sink is None:
        sink = context.stored["sink"] = Sink(address)
    return int(sink.port)


def reach(
    context: Context, peers: dict[str, tuple[str, int]], connect_s: float, bulk_s: float
) -> list[dict[str, Any]]:
    """Connect to each node of ``peers`` (address and port) and move 256 KB."""

    def probe(node: str) -> dict[str, Any]:
        address, port = peers[node]
        context.progress.begin()
        result = deliver(address, port, first=BULK_BYTES, pings=PINGS, connect_s=connect_s, limit_s=bulk_s)
        return to_dict(
            Probe(
                src=context.node,
                dst=int(node),
                connected=result.connected,
                bulk_ok=bool(result.seconds) if result.connected else None,
                seconds=result.seconds[0] + (result.connect_s or 0.0) if result.seconds else None,
                round_trip_s=result.round_trip_s,
                error=result.error,
            )
        )

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return list(pool.map(probe, peers))
