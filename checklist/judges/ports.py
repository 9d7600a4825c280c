"""What the ports of a node have counted during a run: errors, and links that went down."""

from __future__ import annotations

from checklist.judges.advice import finding
from checklist.judges.context import JudgingContext
from checklist.measurements import Counters
from checklist.result import Finding

DOWN = "link_downed"  # the one error of an RDMA port that is serious however seldom
ETHERNET_DOWN = "link_down_events_phy"  # the same of an Ethernet port, as ethtool counts it


def ports(context: JudgingContext, counted: Counters) -> list[Finding]:
    """Findings about what a node's ports have counted in one phase."""
    return [*_carrier(context, counted), *_ethernet(context, counted), *_rdma(context, counted)]


def has_any(counted: Counters) -> bool:
    """Whether a port told anything."""
    told = (counted.rdma_errors, counted.carrier_changes, counted.port_errors)
    return any(one is not None for one in told)


def _carrier(context: JudgingContext, counted: Counters) -> list[Finding]:
    """A carrier that was lost or came back; some drivers count it only in hardware."""
    changes = counted.carrier_changes or 0
    downs = (counted.port_errors or {}).get(ETHERNET_DOWN, 0)
    if not changes and not downs:
        return []
    name, nic = context.name(counted.node), nic_of(context, counted.node)
    how = (
        f"its carrier changed {changes} times"
        if changes
        else f"its port counted {downs} links that went down"
    )
    title = f"The link of {name} ({nic}) went down in phase {counted.phase}: {how}."
    return [finding("loss", "carrier", "FAIL", title, nodes=[name], nic=nic)]


def _ethernet(context: JudgingContext, counted: Counters) -> list[Finding]:
    errors = {what: grown for what, grown in (counted.port_errors or {}).items() if what != ETHERNET_DOWN}
    if not errors:
        return []
    name, nic = context.name(counted.node), nic_of(context, counted.node)
    title = f"{name}: {nic} counted damaged frames in phase {counted.phase}: {_counts(list(errors.items()))}."
    return [finding("loss", "port-errors", "WARN", title, nodes=[name], nic=nic)]


def _rdma(context: JudgingContext, counted: Counters) -> list[Finding]:
    errors = counted.rdma_errors or {}
    if not errors:
        return []
    name = context.name(counted.node)
    down = any(port.endswith(DOWN) for port in errors)
    worst = sorted(errors.items(), key=lambda item: (not item[0].endswith(DOWN), -item[1]))[:3]
    title = f"{name}: RDMA ports counted errors in phase {counted.phase}: {_counts(worst)}."
    return [finding("loss", "rdma-errors", "FAIL" if down else "WARN", title, nodes=[name])]


def _counts(errors: list[tuple[str, int]]) -> str:
    return ", ".join(f"{port} +{grown}" for port, grown in errors)


def nic_of(context: JudgingContext, node: int | None) -> str:
    """The interface that a node uses; a place to fill in where it is not known."""
    return next((fact.nic for fact in context.leaders if fact.node == node and fact.nic), "<interface>")
