"""Detection of RDMA ports that are down or slower than the same port of other nodes."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from checklist.analysis.paths import kind_of
from checklist.judging.advice import finding
from checklist.judging.context import JudgingContext, shorten
from checklist.judging.wiring import port_gbps_of
from checklist.measurements import RdmaPort
from checklist.result import Finding, Gravity

WITNESSES = 2  # minimum number of other nodes with the port up; a single one may be the exception itself
RATE_SHARE = 0.9  # of the machine type's rate; virtual functions may report a little less
_UP = "ACTIVE"  # INIT: a link without a subnet manager; ARMED: a link before activation
_OFF = "Disabled"
_OTHER_NODES, _SAME_NODE = "on the other nodes", "other ports of its model"


def rdma_ports(context: JudgingContext) -> list[Finding]:
    """Report ports of each node that are not up or are slow.

    A port is compared with the port of the same name and model on other nodes of its kind. If no other node
    has one, it is compared with the node's own ports of its model and layer; a port that is switched off
    there is no finding.
    """
    ports_by_node = {fact.node: fact.rdma_ports for fact in context.facts if fact.rdma_ports}
    kinds = {fact.node: kind_of(fact) for fact in context.leaders}
    ports_by_key: dict[tuple[object, ...], dict[int, RdmaPort]] = defaultdict(dict)
    for node, ports in ports_by_node.items():
        for port in ports:
            ports_by_key[kinds.get(node), port.model, port.name][node] = port
    findings = []
    for node, ports in ports_by_node.items():
        down: dict[tuple[Gravity, str], list[str]] = defaultdict(list)
        slow: dict[tuple[Gravity, str], list[str]] = defaultdict(list)
        for port in ports:
            same_port = ports_by_key[kinds.get(node), port.model, port.name]
            peers = [peer for peer_node, peer in same_port.items() if peer_node != node]
            where = _OTHER_NODES if peers else _SAME_NODE
            board = (port.model, port.layer)
            peers = peers or [one for one in ports if one is not port and (one.model, one.layer) == board]
            gravity: Gravity = "FAIL" if where == _OTHER_NODES and len(peers) >= WITNESSES else "WARN"
            switched_off = where == _SAME_NODE and port.physical == _OFF
            mostly_up = peers and 2 * sum(peer.state == _UP for peer in peers) >= len(peers)
            if port.state not in (None, _UP) and mostly_up and not switched_off:
                down[gravity, where].append(f"{port.name} ({port.state}, {port.physical})")
            expected = _usual_rate(peers)
            if port.state == _UP and port.gbps is not None and expected is not None and port.gbps < expected:
                slow[gravity, where].append(f"{port.name} ({port.gbps:g} of {expected:g} Gbit/s)")
        name = context.name(node)
        findings += [
            finding("rdma", code, verdict, _title(name, state, where, names), nodes=[name])
            for code, state, groups in (("rdma-port-down", "down", down), ("rdma-port-slow", "slow", slow))
            for (verdict, where), names in groups.items()
        ]
    return findings


def below_machine(context: JudgingContext) -> list[Finding]:
    """Report ports that are slower on all nodes than those of the cloud's machine type."""
    machine = context.machine
    expected = None if machine is None else port_gbps_of(machine)
    up = [
        port.gbps
        for fact in context.facts
        for port in fact.rdma_ports or ()
        if port.state == _UP and port.gbps is not None
    ]
    if machine is None or expected is None or not up or max(up) >= RATE_SHARE * expected:
        return []
    title = f"No RDMA port is faster than {max(up):g} Gbit/s; {machine.name} has ports of {expected:g}."
    return [finding("rdma", "rdma-below-machine", "WARN", title)]


def rates(context: JudgingContext) -> str:
    """Describe the rates of the ports that are up; empty if no port reported one."""
    reported = {
        port.gbps
        for fact in context.facts
        for port in fact.rdma_ports or ()
        if port.state == _UP and port.gbps is not None
    }
    return f"{' and '.join(f'{rate:g}' for rate in sorted(reported))} Gbit/s" if reported else ""


def _title(name: str, state: str, where: str, ports: list[str]) -> str:
    ports_words, verb = ("ports", "are") if len(ports) > 1 else ("port", "is")
    comparison = f"{where} not" if where == _OTHER_NODES else f"{where} are not"
    return f"{name}: RDMA {ports_words} {shorten(tuple(ports))} {verb} {state}, {comparison}."


def _usual_rate(ports: Sequence[RdmaPort]) -> float | None:
    """Return the most common rate of the ports that are up; the higher rate on a tie."""
    rates = Counter(port.gbps for port in ports if port.state == _UP and port.gbps is not None)
    return max(rates, key=lambda rate: (rates[rate], rate), default=None)
