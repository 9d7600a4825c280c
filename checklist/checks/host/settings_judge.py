"""Check of host settings: equal on all nodes, and equal to a reference host if there is one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from checklist.judging.advice import finding
from checklist.judging.context import JudgingContext, Judgment, decide, no_verdict, shorten, skipped
from checklist.measurements import Facts
from checklist.reference import Reference, comparable, has_name, machine_of, majority, values_of
from checklist.result import Finding

# Differences between the nodes of a run that checks versions and interface already report
ELSEWHERE = ("kernel release", "MTU of the interface in use")
_MAX_NAMED = 4  # maximum number of settings in one title; the result lists all
Differences = tuple[tuple[str, str, str], ...]  # name, own value, reference value


def host_settings(context: JudgingContext) -> Judgment:
    """WARN for a node whose settings differ from the reference or, without one, from most nodes.

    The reference is a node of this run or a stored result. Nodes are compared only with nodes of the same
    machine type, or of the same GPUs and processor. Between nodes, checks versions and interface cover the
    kernel's release and the MTU in use.

    Limits: ``FEWEST`` of checklist/reference.py: 3 nodes of a kind, of which more than half must have the
    same value; values are compared for equality.

    Not detected: whether a difference affects performance; which of two nodes is right; settings that a
    container hides (net.core of old kernels) or only root may read (ACS), which are not compared.
    """
    hosts = [fact for fact in context.leaders if fact.settings][: 1 if context.local else None]
    if not context.facts or (context.leaders and not hosts):
        return context.unmeasured("host-settings", "facts")
    reference, right = _reference(context, hosts)
    compared_hosts = [fact for fact in hosts if right != context.name(fact.node)]
    if not compared_hosts or (reference is None and len(hosts) < 2):
        return skipped("host-settings", "There is one host and no reference (--reference-settings).")
    if reference is None:
        return _among_themselves(context, hosts)
    unlike = [fact for fact in compared_hosts if machine_of(fact) not in reference]
    comparable = [fact for fact in compared_hosts if machine_of(fact) in reference]
    if not comparable:
        title = f"The reference covers {_describe(reference)} only, and this run has no such node."
        return no_verdict("host-settings", title)
    differences_of = {fact.node: _differences(fact, reference[machine_of(fact)]) for fact in comparable}
    findings = _findings(context, differences_of, f"those of {right}", blamed=True)
    passed = f"All known settings are those of {right}."
    if unlike:
        names = shorten(context.names(fact.node for fact in unlike))
        passed += f" Not compared, as their machines differ: {names}."
    return decide("host-settings", passed, findings, nodes=context.all_names)


def _reference(context: JudgingContext, hosts: Iterable[Facts]) -> tuple[Reference | None, str]:
    """Return the reference settings and their name in messages."""
    if context.reference is not None:
        return context.reference, "the reference"
    name = context.reference_node
    host = None if name is None else next((fact for fact in hosts if has_name(fact, name)), None)
    if host is None:
        return None, ""
    return {machine_of(host): host.settings}, context.name(host.node)


def _among_themselves(context: JudgingContext, hosts: list[Facts]) -> Judgment:
    by_kind: dict[str, list[Facts]] = defaultdict(list)
    for fact in hosts:
        by_kind[machine_of(fact)].append(fact)
    findings: list[Finding] = []
    undecided: dict[str, None] = {}
    count = 0
    for hosts_of_kind in by_kind.values():
        by_value = values_of(fact.settings for fact in hosts_of_kind)
        values = {name: counts for name, counts in by_value.items() if name not in ELSEWHERE}
        expected = {name: value for name, counts in values.items() if (value := majority(counts)) is not None}
        undecided |= dict.fromkeys(name for name in values if name not in expected)
        count = max(count, len(expected))
        differences_of = {fact.node: _differences(fact, expected) for fact in hosts_of_kind}
        findings += _findings(context, differences_of, "those of most nodes like it", blamed=False)
    if undecided and not findings:
        reason = f"{shorten(tuple(undecided))}: no value has a majority; choose a node with --reference-node."
        return no_verdict(
            "host-settings", f"The nodes differ in {reason}", measured=True, nodes=context.all_names
        )
    return decide(
        "host-settings", f"{count} settings are the same on all nodes.", findings, nodes=context.all_names
    )


def _differences(fact: Facts, expected: dict[str, str]) -> Differences:
    """Return the host's settings that differ from the expected ones; values unknown to either are skipped."""
    names = sorted({*expected, *fact.settings})
    actual, right = comparable(fact.settings, names), comparable(expected, names)
    shared = sorted(actual.keys() & right.keys())
    return tuple((name, actual[name], right[name]) for name in shared if actual[name] != right[name])


def _findings(
    context: JudgingContext, differences_of: dict[int, Differences], owner: str, *, blamed: bool
) -> list[Finding]:
    """Report one finding per group of nodes with the same differences."""
    nodes_by_differences: dict[Differences, list[int]] = defaultdict(list)
    for node, differences in differences_of.items():
        if differences:
            nodes_by_differences[differences].append(node)
    findings = []
    for differences, nodes in nodes_by_differences.items():
        names = context.names(nodes)
        named = [
            f"{name} {actual} instead of {expected}" for name, actual, expected in differences[:_MAX_NAMED]
        ]
        if len(differences) > _MAX_NAMED:
            named.append(f"{len(differences) - _MAX_NAMED} more")
        title = f"The settings of {shorten(names)} are not {owner}: {'; '.join(named)}."
        nic = next((fact.nic for fact in context.leaders if fact.node == nodes[0]), None)
        findings.append(
            finding(
                "host-settings",
                "settings-differ",
                "WARN",
                title,
                nodes=names if blamed else (),
                suspects=() if blamed else names,
                nic=nic or "<interface>",
            )
        )
    return findings


def _describe(reference: Reference) -> str:
    return " and ".join(reference)
