"""Network units that contain most of the nodes with findings: a shared switch, rack or power supply."""

from __future__ import annotations

import ipaddress
import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from checklist.judging.context import JudgingContext
from checklist.measurements import Facts
from checklist.result import Finding

FEWEST = 3  # nodes with findings that may have a cause in common
CHANCE = 0.01  # probability that as many of them are in one unit by chance; above it, nothing is reported
PREFIXES = {4: 24, 6: 64}  # bits of a host's subnet, used if no node has topology labels


@dataclass(frozen=True, kw_only=True, slots=True)
class CommonCause:
    """A unit with more faulty nodes than chance explains."""

    unit: str
    faulty: int
    """Nodes of the unit with findings, of ``size``; ``total`` in the run."""
    size: int
    total: int

    @property
    def words(self) -> str:
        share = (
            f"{self.faulty} of the {self.total} nodes with findings are among the {self.size} of {self.unit}"
        )
        return f"{share}: check its switch, cabling and power first."


def common_cause(context: JudgingContext, findings: Iterable[Finding]) -> CommonCause | None:
    """Return the unit that the nodes with findings share, the least likely one by chance; None if none."""
    numbers = {context.name(fact.node): fact.node for fact in context.leaders}
    worst = [fault for fault in findings if fault.nodes or len(fault.suspects) == 1]
    fails = [fault for fault in worst if fault.verdict == "FAIL"]
    faulty = {
        numbers[name] for fault in fails or worst for name in fault.nodes or fault.suspects if name in numbers
    }
    if context.local or len(faulty) < FEWEST:
        return None
    total, units = len(context.leaders), _units(context.leaders)
    candidates = []
    for unit, members in units.items():
        inside = len(members & faulty)
        if inside < FEWEST or 2 * inside <= len(faulty):
            continue
        chance = len(units) * _at_least(inside, len(faulty), len(members), total)
        candidates.append((chance, len(members), unit, inside))
    if not candidates or min(candidates)[0] > CHANCE:
        return None
    _, size, unit, inside = min(candidates)
    return CommonCause(unit=unit, faulty=inside, size=size, total=len(faulty))


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
