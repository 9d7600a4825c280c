"""Checks of the network from the ranks' facts: interfaces, RDMA devices, and resolution of hostnames."""

from __future__ import annotations

from collections import defaultdict

from checklist.checks.network.rdma_ports import below_machine, rates, rdma_ports
from checklist.judging.advice import finding
from checklist.judging.context import JudgingContext, Judgment, decide, no_verdict, shorten, skipped
from checklist.measurements import Facts
from checklist.result import Finding, Gravity

RESOLVE_S = 1.0
UNREACHABLE = ("127.", "169.254.", "::1", "fe80")  # prefixes of loopback and link-local addresses


def interface(context: JudgingContext) -> Judgment:
    """FAIL for a node whose NCCL or gloo would use an interface that others cannot reach.

    Such an interface is missing, is down, or has only a loopback or link-local address. FAIL also for an
    address that two hosts have on the interface in use. WARN if the interfaces of the nodes differ in line
    rate or MTU.

    Limits: none; addresses are classified by prefix, rates and MTUs are compared for equality.

    Not detected: whether packets pass (see check mesh), and which interface NCCL finally uses (see check
    transport).
    """
    facts = [fact for fact in context.leaders if fact.nic is not None]
    if not facts:
        return context.unmeasured("interface", "facts")
    duplicates = [] if context.local else _duplicates(context, facts)
    if not duplicates and (context.local or len(context.leaders) == 1):
        return decide("interface", f"{facts[0].nic}; all ranks are on one machine.", nodes=context.all_names)
    findings = []
    for fact in facts:
        fault = _nic_fault(fact)
        if fault is not None:
            others = [
                nic.name for nic in fact.nics if nic.up is not False and not _nic_fault_of(nic.addresses)
            ]
            title = f"{context.name(fact.node)} would use {fact.nic}, {fault}" + (
                f" ({fact.nic_reason})." if fact.nic_reason else "."
            )
            findings.append(
                finding(
                    "interface",
                    "nic-wrong",
                    "FAIL",
                    title,
                    suspects=[context.name(fact.node)],
                    nic=fact.nic,
                    candidates=", ".join(others) or "none that reaches others",
                    best=others[0] if others else "<interface>",
                )
            )
    findings += duplicates
    findings = findings or _unlike_nics(context, facts)
    if len(facts) < len(context.leaders) and not findings:
        return no_verdict("interface", "It is not known which interface every node uses.")
    names = ", ".join(sorted({str(fact.nic) for fact in facts}))
    return decide("interface", f"{names} on all nodes.", findings, nodes=context.all_names)


def _duplicates(context: JudgingContext, facts: list[Facts]) -> list[Finding]:
    """Report addresses that several hosts have on the interface in use.

    One of two such hosts is usually lost before it reports facts; the control channel still knows the address
    from which it joined. A source address that none of its hosts has belongs to a gateway.
    """
    hosts: dict[str, set[int]] = defaultdict(set)  # nodes by address
    for fact in facts:
        addresses = next((nic.addresses for nic in fact.nics if nic.name == fact.nic), ())
        for address in addresses:
            if not address.startswith(UNREACHABLE):
                hosts[address].add(fact.node)
    run = context.measurements
    facts_by_node = {fact.node: fact for fact in context.leaders}
    callers: dict[str, list[int]] = defaultdict(list)
    for node, address in run.callers.items():
        callers[address].append(node)
    for address, nodes in callers.items():
        host_names = {run.hosts.get(node) for node in nodes}
        shared = all(node not in facts_by_node or address in facts_by_node[node].addresses for node in nodes)
        if len(host_names) == len(nodes) > 1 and shared:
            hosts[address] |= set(nodes)
    findings = []
    for address, holders in hosts.items():
        # Two nodes on one host have their own finding
        if (
            len(
                {(facts_by_node[node].boot_id if node in facts_by_node else None) or node for node in holders}
            )
            > 1
        ):
            names = context.names(holders)
            title = f"Duplicate address: {' and '.join(names)} both have {address}."
            findings.append(
                finding(
                    "interface",
                    "address-duplicate",
                    "FAIL",
                    title,
                    suspects=names,
                    address=address,
                    nic=facts[0].nic,
                )
            )
    return findings


def _unlike_nics(context: JudgingContext, facts: list[Facts]) -> list[Finding]:
    """Report interfaces that differ between hosts: a link trained to a lower rate, another MTU."""
    findings = []
    for field, unit, code in (("gbps", "Gbit/s", "nic-rate"), ("mtu", "bytes of MTU", "mtu-differs")):
        holders: dict[float, list[int]] = defaultdict(list)
        for fact in facts:
            value = next((getattr(nic, field) for nic in fact.nics if nic.name == fact.nic), None)
            if value is not None:
                holders[value].append(fact.node)
        if len(holders) > 1:
            common = max(holders, key=lambda value: (len(holders[value]), value))
            odd = context.names(node for value, nodes in holders.items() if value != common for node in nodes)
            holders_text = "; ".join(
                f"{value:g} {unit} on {', '.join(context.names(nodes))}" for value, nodes in holders.items()
            )
            title = f"The interfaces differ: {holders_text}."
            findings.append(finding("interface", code, "WARN", title, suspects=odd))
    return findings


def _nic_fault(fact: Facts) -> str | None:
    nic = next((nic for nic in fact.nics if nic.name == fact.nic), None)
    if nic is None:
        return "which does not exist" if fact.nics else None
    if nic.up is False:
        return "which is down"
    return _nic_fault_of(nic.addresses)


def _nic_fault_of(addresses: tuple[str, ...]) -> str | None:
    reachable = [address for address in addresses if not address.startswith(UNREACHABLE)]
    return None if reachable else "which has no address that others can reach"


def rdma(context: JudgingContext) -> Judgment:
    """FAIL for a node with fewer EFA or InfiniBand devices than the others, or none where required.

    They are required if the machine type's row in estimator/data/instances.csv names EFA. FAIL also for a
    port that is down, or has a lower rate than the port of that name and model on the other nodes; WARN if
    only a single node, or only other ports of the same node, serve as reference, and if no port has the rate
    of the cloud's machine type (InfiniBand and RoCE).

    Limits: the reference is the node with the most devices; for ports, the value of most others, and at least
    ``WITNESSES`` (2) of them for FAIL.

    Not detected: whether packets pass; a device missing on all nodes of an unlisted machine type; a port that
    is down or slow on most nodes, which is taken for unused, if the machine type is not listed.
    """
    if not context.cuda:
        return skipped("rdma", "The run uses no GPUs.")
    efa = {fact.node: fact.efa_devices for fact in context.leaders if fact.efa_devices is not None}
    ib = {fact.node: len(fact.ib_devices) for fact in context.leaders if fact.ib_devices is not None}
    has_efa = context.machine is not None and context.machine.fabric.upper().startswith("EFA")
    if not has_efa and not any(efa.values()) and not any(ib.values()):
        if not efa and not ib:
            return context.unmeasured("rdma", "facts")
        return skipped(
            "rdma", "Neither the machine type nor the hosts have RDMA devices, as far as is known."
        )
    counts = efa if has_efa or any(efa.values()) else ib
    kind = "EFA" if counts is efa else "InfiniBand"
    largest = max(counts.values(), default=0)
    findings = [
        finding(
            "rdma",
            "rdma-missing",
            "FAIL",
            f"{context.name(node)} sees {count} {kind} devices"
            + (f", others {largest}." if largest else "."),
            suspects=[context.name(node)],
        )
        for node, count in counts.items()
        if count < max(largest, 1)
    ]
    if not counts:
        return context.unmeasured("rdma", "facts")
    findings += [*rdma_ports(context), *below_machine(context)]
    port_rates = rates(context)
    passed = f"{largest} {kind} devices on each node" + (f", ports at {port_rates}." if port_rates else ".")
    return decide("rdma", passed, findings, nodes=context.all_names)


def hostname(context: JudgingContext) -> Judgment:
    """FAIL (on one machine WARN) for a host that cannot resolve its own name, WARN if it gets loopback.

    WARN also for slow name resolution, and for two hosts with the same name, which name-based services
    confuse.

    gloo and torch's store announce themselves by that name.

    Limits: ``RESOLVE_S``, 1 s; resolvers time out after 5 s.

    Not detected: whether other hosts resolve the name; check mesh connects by address.
    """
    resolved = [fact for fact in context.leaders if fact.resolves_own_hostname is not None]
    if not resolved:
        return context.unmeasured("hostname", "facts")
    findings = []
    for fact in resolved:
        name = context.name(fact.node)
        address = fact.hostname_address or ""
        if not fact.resolves_own_hostname:
            title = f"{name} cannot resolve its own name, {fact.hostname}."
            verdict: Gravity = "WARN" if context.local else "FAIL"
            findings.append(finding("hostname", "hostname-unresolved", verdict, title, suspects=[name]))
        elif address.startswith(("127.", "::1")) and not context.local and len(context.leaders) > 1:
            title = f"{name}: its own name resolves to {address}."
            findings.append(
                finding(
                    "hostname",
                    "hostname-loopback",
                    "WARN",
                    title,
                    suspects=[name],
                    address=address,
                    nic=fact.nic,
                )
            )
        if (fact.hostname_seconds or 0.0) > RESOLVE_S:
            title = f"{name}: resolving its own name takes {fact.hostname_seconds:.1f} s."
            findings.append(finding("hostname", "hostname-slow", "WARN", title, suspects=[name]))
    findings += _same_names(context)
    return decide("hostname", "Each host resolves its own name.", findings, nodes=context.all_names)


def _same_names(context: JudgingContext) -> list[Finding]:
    """Report names (hostname, or the cluster's name) shared by several hosts."""
    holders: dict[str, dict[int, str | int]] = defaultdict(dict)
    for fact in () if context.local else context.leaders:
        for name in {fact.hostname, fact.node_name or fact.hostname}:
            holders[name][fact.node] = fact.boot_id or fact.node
    findings = []
    for name, nodes in sorted(holders.items()):
        if len(set(nodes.values())) > 1:  # two nodes on one host have their own finding
            title = (
                f"Duplicate host name: different hosts are called {name}: {shorten(context.names(nodes))}."
            )
            suspects = context.names(nodes)
            findings.append(finding("hostname", "hostname-duplicate", "WARN", title, suspects=suspects))
    return findings
