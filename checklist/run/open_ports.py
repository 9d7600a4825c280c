"""Test of each node's ports from the two nodes after it, which identifies whose firewall blocks."""

from __future__ import annotations

from checklist.measurements import OpenPorts, record
from checklist.run.session import Session

NEIGHBORS = 2  # that try each node: one would leave open which of the two blocks
_ROUNDS = 2  # in which a port is tried


def try_ports(run: Session) -> None:
    """Have some nodes listen on all parts of their ranges, and others connect."""
    leaders = {node: rank for node, rank in run.leaders.items() if run.addresses.get(rank)}
    if len(leaders) < 2:
        return
    limits = run.limits
    addresses = {
        rank: {"address": run.addresses[rank], "other": other_family(run, rank)} for rank in leaders.values()
    }
    doors = run.ask("open", addresses, limit_s=limits.operation).replies
    order = [node for node, rank in sorted(leaders.items()) if rank in doors]
    asked: dict[int, list[dict[str, object]]] = {}
    for place, dst in enumerate(order):
        rank = leaders[dst]
        door = {"dst": dst, "low": doors[rank]["low"], "high": doors[rank]["high"]}
        ways = [{**door, "address": addresses[rank]["address"], "tried": doors[rank]["ports"]}]
        if doors[rank]["others"]:
            other = {
                "address": addresses[rank]["other"],
                "tried": doors[rank]["others"],
                "other_family": True,
            }
            ways.append({**door, **other})
        for away in range(1, min(NEIGHBORS, len(order) - 1) + 1):
            asked.setdefault(leaders[order[(place + away) % len(order)]], []).extend(ways)
    most = max((len(ways) for ways in asked.values()), default=0)
    outcome = run.ask(
        "knock",
        {rank: {"doors": ways, "connect_s": limits.connect} for rank, ways in asked.items()},
        limit_s=limits.operation + most * _ROUNDS * limits.connect,
    )
    for reply in outcome.replies.values():
        run.got.open_ports += [record(OpenPorts, one) for one in reply]
    run.ask("close", {rank: {} for rank in doors if rank in run.ranks}, limit_s=limits.operation)


def other_family(run: Session, rank: int) -> str | None:
    """The host's address of the other family on the interface in use; None: it has one family alone."""
    fact, here = run.got.facts.get(rank), run.addresses[rank]
    nic = None if fact is None else next((nic for nic in fact.nics if nic.name == fact.nic), None)
    every = () if nic is None else nic.addresses
    return next(
        (
            address
            for address in every
            if (":" in address) != (":" in here) and not address.startswith(("fe80", "169.254."))
        ),
        None,
    )
