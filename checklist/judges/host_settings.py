"""Are the hosts set up alike, and as the one whose settings are known to be right?"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from checklist.judges.advice import finding
from checklist.judges.context import Judgement, JudgingContext, answer, few, no_verdict, skipped
from checklist.measurements import Facts
from checklist.reference import Reference, compared, is_called, machine_of, most_have, values_of
from checklist.result import Finding

# Between the nodes of a run these are other checks' (versions, interface): no second finding of one thing
ELSEWHERE = ("kernel release", "MTU of the interface in use")
_MOST_NAMED = 4  # settings in one title; the result has all of them
Differences = tuple[tuple[str, str, str], ...]  # name, own value, due value


def host_settings(context: JudgingContext) -> Judgement:
    """WARN for a node whose settings are not the reference's; without one, not those of most nodes.

    The reference is a node of this run or a kept result. Nodes are held against their like: of the same
    machine type, or the same GPUs and processor. Between nodes the kernel's release and the MTU in use are
    left to checks versions and interface.

    Limits: ``FEWEST``, 3 nodes of a kind, of which more than half must have one value, of
    checklist/reference.py; values are compared for being equal.

    Can't tell: whether a difference costs anything; what a container hides (net.core of old kernels) or only
    root may read (ACS), which is not compared; which of two nodes is right.
    """
    hosts = [fact for fact in context.leaders if fact.settings][: 1 if context.local else None]
    if not context.facts or (context.leaders and not hosts):
        return context.unmeasured("host-settings", "facts")
    reference, right = _reference(context, hosts)
    held = [fact for fact in hosts if right != context.name(fact.node)]
    if not held or (reference is None and len(hosts) < 2):
        return skipped("host-settings", "There is one host, and no other's settings (--reference-settings).")
    if reference is None:
        return _among_themselves(context, hosts)
    others = [fact for fact in held if machine_of(fact) not in reference]
    known = [fact for fact in held if machine_of(fact) in reference]
    if not known:
        title = f"The reference is of {_words(reference)}, and no node of this run is."
        return no_verdict("host-settings", title)
    told = {fact.node: _differences(fact, reference[machine_of(fact)]) for fact in known}
    findings = _findings(context, told, f"those of {right}", blamed=True)
    good = f"All settings that are known are those of {right}."
    if others:
        names = few(context.names(fact.node for fact in others))
        good += f" Not compared, as of another kind: {names}."
    return answer("host-settings", good, findings, nodes=context.all_names)


def _reference(context: JudgingContext, hosts: Iterable[Facts]) -> tuple[Reference | None, str]:
    """The settings that are right, and what they are called."""
    if context.reference is not None:
        return context.reference, "the reference"
    name = context.reference_node
    found = None if name is None else next((fact for fact in hosts if is_called(fact, name)), None)
    if found is None:
        return None, ""
    return {machine_of(found): found.settings}, context.name(found.node)


def _among_themselves(context: JudgingContext, hosts: list[Facts]) -> Judgement:
    by_kind: dict[str, list[Facts]] = defaultdict(list)
    for fact in hosts:
        by_kind[machine_of(fact)].append(fact)
    findings: list[Finding] = []
    open_ones: dict[str, None] = {}
    count = 0
    for same in by_kind.values():
        counted = values_of(fact.settings for fact in same)
        values = {name: counts for name, counts in counted.items() if name not in ELSEWHERE}
        due = {name: value for name, counts in values.items() if (value := most_have(counts)) is not None}
        open_ones |= dict.fromkeys(name for name in values if name not in due)
        count = max(count, len(due))
        told = {fact.node: _differences(fact, due) for fact in same}
        findings += _findings(context, told, "those of most nodes like it", blamed=False)
    if open_ones and not findings:
        why = f"{few(tuple(open_ones))}: no value is that of most nodes; --reference-node says who is right."
        return no_verdict(
            "host-settings", f"The nodes differ in {why}", measured=True, nodes=context.all_names
        )
    return answer(
        "host-settings", f"{count} settings are the same on all nodes.", findings, nodes=context.all_names
    )


def _differences(fact: Facts, due: dict[str, str]) -> Differences:
    """What of the host's settings is not as due; what either side doesn't know is not compared."""
    names = sorted({*due, *fact.settings})
    own, right = compared(fact.settings, names), compared(due, names)
    both = sorted(own.keys() & right.keys())
    return tuple((name, own[name], right[name]) for name in both if own[name] != right[name])


def _findings(
    context: JudgingContext, told: dict[int, Differences], whose: str, *, blamed: bool
) -> list[Finding]:
    """One for all nodes that differ in the same way."""
    alike: dict[Differences, list[int]] = defaultdict(list)
    for node, differences in told.items():
        if differences:
            alike[differences].append(node)
    findings = []
    for differences, nodes in alike.items():
        names = context.names(nodes)
        words = [f"{name} {own} instead of {due}" for name, own, due in differences[:_MOST_NAMED]]
        if len(differences) > _MOST_NAMED:
            words.append(f"{len(differences) - _MOST_NAMED} more")
        title = f"The settings of {few(names)} are not {whose}: {'; '.join(words)}."
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


def _words(reference: Reference) -> str:
    return " and ".join(reference)
