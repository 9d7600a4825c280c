"""Test of each node's ports from the two nodes after it, which identifies whose firewall blocks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from checklist.measurements import OpenPorts, record
from checklist.run.session import Session

NEIGHBORS = 2  # nodes that probe each node; with one, either of the two could be blocking
_ROUNDS = 2  # attempts per port


def try_ports(run: Session) -> None:
    """Have nodes listen on ports sampled from their ranges, and their neighbors connect."""
    leaders = {node: rank for node, rank in run.leaders.items() if run.addresses.get(rank)}
    if len(leaders) < 2:
        return
    limits = run.limits
    addresses = {
        rank: {"address": run.addresses[rank], "other_address": other_family(run, rank)}
        for rank in leaders.values()
    }
    listeners = run.request("open", addresses, limit_s=limits.operation).replies
    requests = _targets(leaders, listeners, addresses)
    count = max((len(targets) for targets in requests.values()), default=0)
    outcome = run.request(
        "knock",
        {rank: {"targets": targets, "connect_s": limits.connect} for rank, targets in requests.items()},
        limit_s=limits.operation + count * _ROUNDS * limits.connect,
    )
    for reply in outcome.replies.values():
        run.results.open_ports += [record(OpenPorts, item) for item in reply]
    run.request("close", {rank: {} for rank in listeners if rank in run.ranks}, limit_s=limits.operation)


def _targets(
    leaders: Mapping[int, int],
    listeners: Mapping[int, Mapping[str, Any]],
    addresses: Mapping[int, Mapping[str, str | None]],
) -> dict[int, list[dict[str, object]]]:
    """Return the ports to connect to by connecting rank: those of the nodes before it, in both families.

    ``leaders``: node -> rank. ``listeners``: rank -> ports on which it listens.
    """
    order = [node for node, rank in sorted(leaders.items()) if rank in listeners]
    requests: dict[int, list[dict[str, object]]] = {}
    for index, dst in enumerate(order):
        rank = leaders[dst]
        listener, address = listeners[rank], addresses[rank]
        base = {"dst": dst, "low": listener["low"], "high": listener["high"]}
        targets = [{**base, "address": address["address"], "tried": listener["ports"]}]
        if listener["others"]:
            other = {"address": address["other_address"], "tried": listener["others"], "other_family": True}
            targets.append({**base, **other})
        for distance in range(1, min(NEIGHBORS, len(order) - 1) + 1):
            requests.setdefault(leaders[order[(index + distance) % len(order)]], []).extend(targets)
    return requests


def other_family(run: Session, rank: int) -> str | None:
    """Return the host's address of the other family on the interface in use; None if it has only one
    family.
    """
    fact, own_address = run.results.facts.get(rank), run.addresses[rank]
    nic = None if fact is None else next((nic for nic in fact.nics if nic.name == fact.nic), None)
    addresses = () if nic is None else nic.addresses
    return next(
        (
            address
            for address in addresses
            if (":" in address) != (":" in own_address) and not address.startswith(("fe80", "169.254."))
        ),
        None,
    )
