"""Findings from port counters of a node during a run: errors, and links that went down."""

from __future__ import annotations

from checklist.judging.advice import finding
from checklist.judging.context import JudgingContext
from checklist.measurements import Counters
from checklist.result import Finding

DOWN = "link_downed"  # RDMA port counter that is serious even for a single event
ETHERNET_DOWN = "link_down_events_phy"  # its equivalent for Ethernet ports in ethtool


def ports(context: JudgingContext, counters: Counters) -> list[Finding]:
    """Return findings from the counters of a node's ports in one phase."""
    return [*_carrier(context, counters), *_ethernet(context, counters), *_rdma(context, counters)]


def has_counters(counters: Counters) -> bool:
    """Return whether any port reported counters."""
    reported = (counters.rdma_errors, counters.carrier_changes, counters.port_errors)
    return any(value is not None for value in reported)


def _carrier(context: JudgingContext, counters: Counters) -> list[Finding]:
    """Report carrier changes; some drivers count them only in hardware."""
    changes = counters.carrier_changes or 0
    downs = (counters.port_errors or {}).get(ETHERNET_DOWN, 0)
    if not changes and not downs:
        return []
    name, nic = context.name(counters.node), nic_of(context, counters.node)
    text = (
        f"its carrier changed {changes} times"
        if changes
        else f"its port counted {downs} links that went down"
    )
    title = f"The link of {name} ({nic}) went down in phase {counters.phase}: {text}."
    return [finding("loss", "carrier", "FAIL", title, nodes=[name], nic=nic)]


def _ethernet(context: JudgingContext, counters: Counters) -> list[Finding]:
    errors = {
        counter: increase
        for counter, increase in (counters.port_errors or {}).items()
        if counter != ETHERNET_DOWN
    }
    if not errors:
        return []
    name, nic = context.name(counters.node), nic_of(context, counters.node)
    title = (
        f"{name}: {nic} counted damaged frames in phase {counters.phase}: {_counts(list(errors.items()))}."
    )
    return [finding("loss", "port-errors", "WARN", title, nodes=[name], nic=nic)]


def _rdma(context: JudgingContext, counters: Counters) -> list[Finding]:
    errors = counters.rdma_errors or {}
    if not errors:
        return []
    name = context.name(counters.node)
    link_down = any(port.endswith(DOWN) for port in errors)
    worst = sorted(errors.items(), key=lambda item: (not item[0].endswith(DOWN), -item[1]))[:3]
    title = f"{name}: RDMA ports counted errors in phase {counters.phase}: {_counts(worst)}."
    return [finding("loss", "rdma-errors", "FAIL" if link_down else "WARN", title, nodes=[name])]


def _counts(errors: list[tuple[str, int]]) -> str:
    return ", ".join(f"{port} +{increase}" for port, increase in errors)


def nic_of(context: JudgingContext, node: int | None) -> str:
    """Return the interface that a node uses, or a placeholder if it is unknown."""
    return next((fact.nic for fact in context.leaders if fact.node == node and fact.nic), "<interface>")
