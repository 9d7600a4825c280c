"""Network units or rails with most of the faulty parts: a shared switch, rack or power supply."""

from __future__ import annotations

import ipaddress
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator

from checklist.judging.context import JudgingContext
from checklist.measurements import Facts
from checklist.result import Finding

FEWEST = 3  # nodes or rails with findings that may have a cause in common
CHANCE = 0.01  # probability that as many of them are in one unit by chance; above it, nothing is reported
SLOW_RAIL = "slow-rail"  # code of a finding about one rail of a node
PREFIXES = {4: 24, 6: 64}  # bits of a host's subnet, used if no node has topology labels


def common_cause(context: JudgingContext, findings: Iterable[Finding]) -> str | None:
    """Describe the unit or rail that most faulty parts share, the least likely by chance; None if none."""
    reported = tuple(findings)
    causes = [] if context.local else [*_shared_units(context, reported), *_shared_rails(context, reported)]
    chance, description = min(causes, key=lambda cause: cause[0], default=(1.0, ""))
    return description if chance <= CHANCE else None


def _shared_units(context: JudgingContext, findings: tuple[Finding, ...]) -> Iterator[tuple[float, str]]:
    """Yield the probability by chance and the description of each unit with most of the faulty nodes."""
    numbers = {context.name(fact.node): fact.node for fact in context.leaders}
    of_one_node = [fault for fault in findings if fault.nodes or len(fault.suspects) == 1]
    fails = [fault for fault in of_one_node if fault.verdict == "FAIL"]
    faulty = {
        numbers[name]
        for fault in fails or of_one_node
        for name in fault.nodes or fault.suspects
        if name in numbers
    }
    units = _units(context.leaders)
    for unit, members in sorted(units.items(), key=lambda item: len(item[1])):
        inside = len(members & faulty)
        if inside < FEWEST or 2 * inside <= len(faulty):
            continue
        chance = len(units) * _at_least(inside, len(faulty), len(members), len(context.leaders))
        description = (
            f"{inside} of the {len(faulty)} nodes with findings are among the {len(members)} of {unit}: "
        )
        yield chance, f"{description}check its switch, cabling and power first."


def _shared_rails(context: JudgingContext, findings: tuple[Finding, ...]) -> Iterator[tuple[float, str]]:
    """Yield the probability by chance and the description of each rail with most of the slow rails."""
    local_ranks = {fact.rank: fact.local_rank for fact in context.facts}
    slow = Counter(
        local_ranks[fault.ranks[0]]
        for fault in findings
        if fault.code == SLOW_RAIL and len(fault.ranks) == 1 and fault.ranks[0] in local_ranks
    )
    rails, total = context.measurements.gpus_per_node_asked, slow.total()
    for rail, count in slow.items():
        if count < FEWEST or 2 * count <= total:
            continue
        hits = range(count, total + 1)
        chance = (
            rails * sum(math.comb(total, hit) * (rails - 1) ** (total - hit) for hit in hits) / rails**total
        )
        yield chance, f"{count} of the {total} slow rails are rail {rail}: check its switches first."


def _at_least(inside: int, chosen: int, size: int, total: int) -> float:
    """Return the probability that ``inside`` or more of ``chosen`` random nodes are among ``size``."""
    hits = range(inside, min(chosen, size) + 1)
    ways = sum(math.comb(size, hit) * math.comb(total - size, chosen - hit) for hit in hits)
    return ways / math.comb(total, chosen)


def _units(leaders: Iterable[Facts]) -> dict[str, set[int]]:
    """Return the nodes of each network unit, NVLink domain, zone and switch that holds some of the nodes.

    Without labels of the network or LLDP, subnets of the used interface take their place.
    """
    facts = tuple(leaders)
    labeled = any(fact.network_nodes or fact.switches for fact in facts)
    units: dict[str, set[int]] = defaultdict(set)
    for fact in facts:
        names = [*fact.network_nodes]
        names += [f"NVLink domain {fact.nvlink_domain}"] if fact.nvlink_domain else []
        names += [f"zone {fact.zone}"] if fact.zone else []
        names += [f"switch {switch}" for switch in fact.switches]
        names += [] if labeled else _subnets(fact)
        for name in names:
            units[name].add(fact.node)
    return {name: nodes for name, nodes in units.items() if 1 < len(nodes) < len(facts)}


def _subnets(fact: Facts) -> list[str]:
    addresses = [address for nic in fact.nics if nic.name == fact.nic for address in nic.addresses]
    subnets = []
    for text in addresses:
        address = ipaddress.ip_address(text.partition("%")[0])
        if not address.is_link_local:
            network = ipaddress.ip_network(f"{address}/{PREFIXES[address.version]}", strict=False)
            subnets.append(f"subnet {network}")
    return subnets
