"""Reference host settings: from a stored result or from one node of this run."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from checklist import result
from checklist.measurements import COMMAND_LINE, CPU, PARAMETER, SAME_AS_RANK, Facts
from estimator.errors import UserError

Settings = Mapping[str, str]
Reference = dict[str, dict[str, str]]  # settings by kind of machine
MIN_HOSTS = 3  # minimum number of hosts for a majority value
NOT_SET = "not set"


def machine_of(fact: Facts) -> str:
    """Return the key of comparable hosts: the machine type or, if unknown, GPUs and processor."""
    if fact.instance_type:
        return fact.instance_type
    gpus = [f"{count} x {name}" for name, count in Counter(fact.gpu_names).items()]
    return ", ".join([*gpus, fact.settings.get(CPU, "a processor that is not known")])


def comparable(settings: Settings, names: Iterable[str]) -> dict[str, str]:
    """Return the named settings that the host reported; a kernel parameter that was not passed is unset."""
    reported = {}
    for name in names:
        value = settings.get(name)
        if value is None and name.startswith(PARAMETER) and COMMAND_LINE in settings:
            value = NOT_SET
        if value is not None and name not in (CPU, COMMAND_LINE):
            reported[name] = value
    return reported


def values_of(hosts: Iterable[Settings]) -> dict[str, Counter[str]]:
    """Count the hosts with each value, by setting."""
    facts = list(hosts)
    names = sorted({name for settings in facts for name in settings})
    values: dict[str, Counter[str]] = defaultdict(Counter)
    for settings in facts:
        for name, value in comparable(settings, names).items():
            values[name][value] += 1
    return values


def majority(counts: Counter[str]) -> str | None:
    """Return the value of more than half of the hosts (at least ``MIN_HOSTS``) or of all; else None."""
    value, count = counts.most_common(1)[0]
    enough = counts.total() >= MIN_HOSTS and 2 * count > counts.total()
    return value if enough or count == counts.total() else None


def read(file: Path, node: str | None = None) -> Reference:
    """Read the settings of a result, by kind of machine: the named node's, else those of most nodes.

    Raises UserError if the file is no result, or has no settings of that node.
    """
    reported = result.read(file.expanduser()).measurements.facts
    by_rank = {fact.rank: fact.settings for fact in reported}
    hosts = [
        replace(fact, settings=by_rank[int(fact.settings.get(SAME_AS_RANK, fact.rank))])
        for fact in reported
        if fact.settings
    ]
    if node is not None:
        hosts = [fact for fact in hosts if has_name(fact, node)][:1]
    if not hosts:
        owner = "any node" if node is None else node
        names = dict.fromkeys(fact.node_name or fact.hostname for fact in reported if fact.settings)
        raise UserError(
            f"{file} has no settings of {owner}.",
            f"It has those of {_shorten(names)}."
            if names
            else "Create it again with --json: an older one has none.",
        )
    by_kind: dict[str, list[dict[str, str]]] = defaultdict(list)
    for fact in hosts:
        by_kind[machine_of(fact)].append(fact.settings)
    return {kind: _profile(facts) for kind, facts in by_kind.items()}


def _profile(hosts: list[dict[str, str]]) -> dict[str, str]:
    """Return the settings of most hosts."""
    reported = {name: value for name, counts in values_of(hosts).items() if (value := majority(counts))}
    return reported | {COMMAND_LINE: "read"} if any(COMMAND_LINE in host for host in hosts) else reported


def has_name(fact: Facts, name: str) -> bool:
    return name in (fact.node_name, fact.hostname)


def check_node(name: str | None, facts: Iterable[Facts]) -> None:
    """Check that a node of this run has the name. Raises UserError if none does."""
    reported = sorted(facts, key=lambda fact: fact.rank)
    if name is None or not reported or any(has_name(fact, name) for fact in reported):
        return
    names = dict.fromkeys(fact.node_name or fact.hostname for fact in reported)
    raise UserError(
        f"There is no node {name!r} among those of this run, {_shorten(names)}.",
        "Give --reference-node one of them.",
    )


def _shorten(names: Iterable[str]) -> str:
    items = list(names)
    return ", ".join(items[:8]) + (f" and {len(items) - 8} more" if len(items) > 8 else "")
