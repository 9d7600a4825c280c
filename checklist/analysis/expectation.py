"""Expected bus bandwidth of collectives: a bound from line rates, and the share that healthy clusters reach.

The bound of a run is the slower of two terms, both in GB/s of busbw as nccl-tests defines it:

* **link**: rate of one GPU's link (NVLink, xGMI, PCIe) to the others of its domain, one direction. A ring
  moves ``busbw`` bytes a second over each link. NVLink SHARP (NVLS) reduces in the switch and exceeds it.
* **network**: rate of all ports of one domain together, one direction. A ring enters and leaves each domain
  once per channel, so its busbw is at most that rate. A tree over two domains sends each byte once instead of
  twice and reaches up to 2 (n - 1) / n times it (NVIDIA/nccl#209), as long as the links allow it. In an
  all-to-all over k domains of g GPUs, each GPU sends (n - g) / n of its buffer over the network.

A domain is the set of GPUs that one NVLink switch connects: a host, or a rack (GB200 NVL72).

Healthy clusters reach a share of a term that depends on the fabric and, because of latency, on the size S:
``share / (1 + half / S)``. ``python -m benchmarks.busbw`` derives the shares from the published figures in
checklist/data/busbw.csv, writes them to estimator/data/fabric_shares.csv, which the estimator uses as well,
and the verdicts with each source left out to benchmarks/results/busbw.md.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal, get_args

from checklist.analysis.busbw import MIB
from estimator.data import load_rows
from estimator.hardware.fabrics import RDMA, Shares, fabric_shares, tcp_kind

FILE = Path(__file__).parents[1] / "data" / "busbw.csv"
Condition = Literal["healthy", "bad", "gate"]
GATE: Condition = "gate"
_CONDITIONS: dict[str, Condition] = {name: name for name in get_args(Condition)}
JUDGED = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")  # operations with published figures
SMALLEST_BYTES = 64 * MIB  # smaller messages measure latency rather than bandwidth
FAIL_SHARE = 0.6  # share of the low end, or of the bound, below which a figure fails
DOMAIN_PORTS = 8  # ports that NCCL drives in a domain of several hosts; fits 2 and 20 racks of NVL72
HOST_GPUS = 16  # a larger domain spans several hosts
NVLS_GPUS = 6  # NCCL uses NVLS from 5 (H200) or 6 GPUs (B200) of a domain
BEYOND = 1.2  # multiple of the upper bound above which the known links can not be the ones in use
PAIR = "pair"  # operation: all GPUs of a node to their counterparts on another, one direction
# Margin below the lowest published share, by the number of sources: few sources leave more unseen
MANY_SOURCES = 3
MARGIN, MARGIN_OF_FEW = 0.93, 0.85
FABRICS = {
    "infiniband": "InfiniBand",
    "roce": "RoCE",
    "efa1": "EFA v1",
    "efa2": "EFA v2",
    "efa3": "EFA v3",
    "efa4": "EFA v4",
    "tcpx": "GPUDirect-TCPX",
    "tcpxo": "GPUDirect-TCPXO",
    "tcp": "TCP",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Wiring:
    """Links and network of a run. None: unknown."""

    gpus: int
    """GPUs (ranks) of one domain."""
    domains: int
    link: str | None = None
    """"nvlink", "xgmi" or "pcie"."""
    link_gbytes_per_s: float | None = None
    """One GPU's rate to the others of its domain, one direction."""
    nvlink_sharp: bool = False
    """Whether the GPUs and switches of the domain support NVLS and it is not disabled."""
    fabric: str | None = None
    """A key of the table of fabrics: "infiniband", "roce", "efa2", "tcp" ..."""
    ports: int | None = None
    """Ports of one domain."""
    port_gbps: float | None = None

    @property
    def ranks(self) -> int:
        return self.gpus * self.domains

    @property
    def used_ports(self) -> int | None:
        """Ports that NCCL drives: of InfiniBand and RoCE one for each GPU, of a rack ``DOMAIN_PORTS``."""
        if self.ports is None:
            return None
        if self.gpus > HOST_GPUS:
            return min(self.ports, DOMAIN_PORTS)
        return min(self.ports, self.gpus) if self.fabric in ("infiniband", "roce") else self.ports

    @property
    def network_gbytes_per_s(self) -> float | None:
        """Line rate of the used ports of one domain together, one direction."""
        if self.used_ports is None or self.port_gbps is None:
            return None
        return self.used_ports * self.port_gbps / 8

    def describe_network(self) -> str:
        """Return the arithmetic of the network's rate: "8 ports x 400 Gbit/s (InfiniBand) = 400 GB/s"."""
        rate = self.network_gbytes_per_s or 0
        ports = f"{self.used_ports} ports x " if self.used_ports != 1 else ""
        owner = "node" if self.gpus <= HOST_GPUS else "rack"
        return (
            f"{ports}{self.port_gbps:g} Gbit/s ({FABRICS[self.fabric or 'tcp']}) = {rate:.4g} GB/s a {owner}"
        )

    def describe_link(self) -> str:
        kind = {"nvlink": "NVLink", "xgmi": "xGMI", "pcie": "PCIe"}[self.link or "pcie"]
        return f"{kind} {self.link_gbytes_per_s:.4g} GB/s a GPU"


@dataclass(frozen=True, kw_only=True, slots=True)
class Published:
    """One published figure."""

    source: str
    date: str
    wiring: Wiring
    op: str
    bytes: int
    algorithm: str | None
    busbw_gbytes_per_s: float
    condition: Condition
    """"gate": the lowest value that a vendor's own check accepts."""
    gpu: str
    note: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Term:
    """One limit of the bus bandwidth."""

    name: Literal["link", "network"]
    kind: str
    """Group of published figures that its shares are from."""
    gbytes_per_s: float
    """busbw at the line rate, by a ring."""
    half_bytes: float
    """Message size at which latency costs half of the bandwidth."""

    def at(self, share: float, size_bytes: int) -> float:
        return self.gbytes_per_s * share / (1 + self.half_bytes / size_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Expectation:
    """Range of busbw that healthy clusters of this wiring reach, GB/s."""

    low: float
    typical: float
    maximum: float
    """Upper bound for any algorithm."""
    fail_below: float
    arithmetic: str
    """Rates that the range follows from."""
    sources: int
    """Sources of the published figures behind the range."""

    def contradicted_by(self, busbw_gbytes_per_s: float) -> bool:
        """Return whether a figure is too fast for the known links."""
        return busbw_gbytes_per_s > BEYOND * self.maximum

    def verdict(self, busbw_gbytes_per_s: float) -> Literal["PASS", "WARN", "FAIL"]:
        if busbw_gbytes_per_s >= self.low:
            return "PASS"
        return "FAIL" if busbw_gbytes_per_s < self.fail_below else "WARN"


Ranges = Mapping[str, Shares]


def user_expectation(busbw_gbytes_per_s: float) -> Expectation:
    """Return the range around a figure that the user expects."""
    return Expectation(
        low=MARGIN * busbw_gbytes_per_s,
        typical=busbw_gbytes_per_s,
        maximum=math.inf,
        fail_below=FAIL_SHARE * MARGIN * busbw_gbytes_per_s,
        arithmetic="given by --expect",
        sources=1,
    )


def expect(
    wiring: Wiring, op: str, size_bytes: int, algorithm: str | None = None, ranges: Ranges | None = None
) -> Expectation | None:
    """Return the expected range; None if a rate is unknown, or nothing is published of the operation or size.

    ``ranges``: shares by kind of term; None: those of estimator/data/fabric_shares.csv.
    """
    terms = _terms(wiring, op, algorithm)
    if terms is None or size_bytes * 1.001 < SMALLEST_BYTES:  # messages are cut to a multiple of the ranks
        return None
    known_ranges = fabric_shares() if ranges is None else ranges
    term_shares = [(term, _shares(term.kind, known_ranges)) for term in terms]
    usable = [(term, shares) for term, shares in term_shares if shares is not None]
    if len(usable) < len(term_shares):
        return None
    low = min(term.at(shares.low, size_bytes) for term, shares in usable)
    typical = min(term.at(shares.typical, size_bytes) for term, shares in usable)
    lines = [FAIL_SHARE * term.at(1.0, size_bytes) for term, _ in usable if term.name == "network"]
    at_line_rate = min(lines, default=0.0)
    fail_below = max(FAIL_SHARE * low, at_line_rate if at_line_rate < low else 0.0)
    if op == PAIR:  # no figures of pairs are published, so that only a gross deficit is judged
        low = fail_below = FAIL_SHARE * low
    return Expectation(
        low=low,
        typical=typical,
        maximum=_upper_bound(wiring, op, terms),
        fail_below=fail_below,
        arithmetic=_arithmetic(wiring, terms),
        sources=min(shares.sources for _, shares in usable),
    )


def _terms(wiring: Wiring, op: str, algorithm: str | None) -> list[Term] | None:
    """Return the limits of an operation; None if one is unknown."""
    if op not in (*JUDGED, PAIR):
        return None
    terms = []
    ranks = wiring.ranks
    if wiring.gpus > 1 and op != PAIR:
        if wiring.link is None or wiring.link_gbytes_per_s is None:
            if wiring.domains == 1:
                return None
        else:
            kind = _link_kind(wiring, op, algorithm)
            half = (30 + 2.5 * wiring.gpus) * MIB
            terms.append(Term(name="link", kind=kind, gbytes_per_s=wiring.link_gbytes_per_s, half_bytes=half))
    if wiring.domains > 1:
        rate = wiring.network_gbytes_per_s
        if rate is None or wiring.fabric is None:
            return None
        if op == "all_to_all":
            rate *= (ranks - 1) / (wiring.gpus * (ranks - wiring.gpus))
        half = (_half_mib(wiring.fabric) + 0.6 * (2 if op == PAIR else ranks)) * MIB
        kind = _network_kind(wiring)
        terms.append(Term(name="network", kind=kind, gbytes_per_s=rate, half_bytes=half))
    return terms or None


def _half_mib(fabric: str) -> float:
    """Return the size-independent part of half_bytes, fitted to the published sweeps (MiB)."""
    return 165.0 if fabric in ("efa2", "efa3", "efa4") else 40.0 if fabric == "efa1" else 10.0


def _link_kind(wiring: Wiring, op: str, algorithm: str | None) -> str:
    if wiring.link != "nvlink":
        return wiring.link or "pcie"
    if wiring.gpus == 2:
        return "nvlink-pair"
    sharp = op == "all_reduce" and wiring.nvlink_sharp and wiring.gpus >= NVLS_GPUS
    # Across domains NCCL may choose a ring, which the links limit to their own rate
    if not sharp or wiring.domains > 1 or not (algorithm or "NVLS").startswith("NVLS"):
        return "nvlink"
    return f"nvls-{wiring.link_gbytes_per_s:g}"


def _network_kind(wiring: Wiring) -> str:
    fabric = wiring.fabric or "tcp"
    if fabric.startswith("efa"):
        return "efa"
    if fabric.startswith("tcpx"):
        return "tcpx"
    return tcp_kind((wiring.network_gbytes_per_s or 0) * 8) if fabric == "tcp" else fabric


def _shares(kind: str, ranges: Ranges) -> Shares | None:
    """Return the shares of a kind, or those of its family if few sources cover the kind."""
    exact, family = ranges.get(kind), ranges.get(_family(kind) or "")
    few_sources = exact is None or exact.sources < MANY_SOURCES
    return family if few_sources and family is not None else exact


def _family(kind: str) -> str | None:
    """Return the group of kinds that resemble each other."""
    if kind in ("efa", "infiniband", "roce"):
        return RDMA
    return "nvls" if kind.startswith("nvls-") else None


def _upper_bound(wiring: Wiring, op: str, terms: Iterable[Term]) -> float:
    """Return the upper bound for any algorithm."""
    ranks, limits = wiring.ranks, []
    for term in terms:
        rate = term.gbytes_per_s
        sent_once = wiring.domains == 2 or wiring.fabric == "infiniband"
        if op == "all_reduce" and term.name == "network" and sent_once:
            # A tree over two domains, or SHARP in the switches of InfiniBand: each byte is sent once
            rate *= max(1.0, 2 * (ranks - 1) / ranks)
        elif op == "all_reduce" and term.name == "link" and wiring.nvlink_sharp:
            # With NVLS a GPU sends its buffer once and 1/g of the result
            rate *= max(1.0, 2 * (wiring.gpus - 1) / (wiring.gpus + 1))
        limits.append(rate)
    return min(limits)


def _arithmetic(wiring: Wiring, terms: Iterable[Term]) -> str:
    names = {term.name for term in terms}
    rates = [wiring.describe_network()] if "network" in names else []
    return ", ".join([*rates, wiring.describe_link()] if "link" in names else rates)


# ---- published figures


@cache
def published() -> tuple[Published, ...]:
    """Read checklist/data/busbw.csv."""
    return tuple(_row(cells) for cells in load_rows(FILE))


def _row(cells: Mapping[str, str]) -> Published:
    return Published(
        source=cells["source"],
        date=cells["date"],
        wiring=Wiring(
            gpus=int(cells["gpus"]),
            domains=int(cells["domains"]),
            link=cells["link"] or None,
            link_gbytes_per_s=float(cells["link_gbytes_per_s"]) if cells["link_gbytes_per_s"] else None,
            nvlink_sharp=_supports_nvls(cells["gpu"]),
            fabric=cells["fabric"] or None,
            ports=int(cells["ports"]) if cells["ports"] else None,
            port_gbps=float(cells["port_gbps"]) if cells["port_gbps"] else None,
        ),
        op=cells["op"],
        bytes=int(cells["bytes"]),
        algorithm=cells["algorithm"] or None,
        busbw_gbytes_per_s=float(cells["busbw_gbytes_per_s"]),
        condition=_CONDITIONS[cells["condition"]],
        gpu=cells["gpu"],
        note=cells["note"],
    )


def _supports_nvls(gpu: str) -> bool:
    from estimator import hardware

    return gpu != "" and nvlink_sharp(hardware.gpu(gpu).architecture)


def nvlink_sharp(architecture: str | None) -> bool:
    """Return whether NVSwitches of that GPU generation reduce (NVLS): Hopper and newer."""
    return architecture is not None and architecture.startswith(("Hopper", "Blackwell"))


def ranges_of(rows: Iterable[Published]) -> Ranges:
    """Derive the shares by kind of term from healthy figures, or from vendors' gates if there are no others.

    A figure counts for the term that limits it, under that term's kind and under the kind's family.
    """
    by_kind: dict[str, list[tuple[str, float]]] = {}
    gates: dict[str, list[tuple[str, float]]] = {}
    for row in rows:
        terms = _terms(row.wiring, row.op, row.algorithm)
        if row.condition == "bad" or not terms:
            continue
        limit = min(terms, key=lambda term: term.at(_ASSUMED[term.name], row.bytes))
        efficiency = row.busbw_gbytes_per_s / limit.at(1.0, row.bytes)
        target = by_kind if row.condition == "healthy" else gates
        for kind in {limit.kind, _family(limit.kind) or limit.kind}:
            target.setdefault(kind, []).append((row.source, efficiency))
    for kind, samples in gates.items():
        by_kind.setdefault(kind, samples)
    return {kind: _range(samples) for kind, samples in by_kind.items()}


# Shares assumed only to decide which term limits a published figure
_ASSUMED = {"link": 0.8, "network": 0.9}


def _range(samples: list[tuple[str, float]]) -> Shares:
    sources = len({source for source, _ in samples})
    efficiencies = [value for _, value in samples]
    margin = MARGIN if sources >= MANY_SOURCES else MARGIN_OF_FEW
    return Shares(low=margin * min(efficiencies), typical=statistics.median(efficiencies), sources=sources)
