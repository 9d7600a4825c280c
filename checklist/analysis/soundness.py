"""Filters for physically impossible measurements: NaN, non-positive durations, rates above a ceiling.

The rank or node that reported one is listed in ``Measurements.unsound``. The value is excluded everywhere:
from references, from the medians of peers and from the history.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from checklist.analysis.baseline import Record
from checklist.analysis.busbw import SMALL_BYTES
from checklist.analysis.ceilings import Ceiling, Ceilings, none_above
from checklist.measurements import (
    Collective,
    Counters,
    Facts,
    GpuHealth,
    Local,
    Measurements,
    Pair,
    Probe,
    Unsound,
)
from checklist.registry import LOCALS

UNLIMITED = -1  # value of memlock without a limit
_COUNTS = (
    "ecc_uncorrected",
    "ecc_corrected",
    "sm_clock_mhz",
    "sm_clock_set_mhz",
    "sm_clock_default_mhz",
    "memory_clock_mhz",
    "memory_clock_most_mhz",
    "pcie_generation",
    "pcie_generation_gpu",
    "pcie_generation_most",
    "pcie_width",
    "pcie_width_most",
    "pcie_replays",
    "remap_exhausted_banks",
    "memory_mib",
    "nvlinks_active",
    "nvlink_mbytes_per_s",
)
_FLOATS = ("temperature_c", "slowdown_c", "power_w", "power_limit_w", "power_default_w")
T = TypeVar("T")


def sound(measurements: Measurements) -> Measurements:
    """Remove physically impossible values and list each of them in ``unsound``."""
    run, unsound = measurements, list(measurements.unsound)
    ceilings, nodes = Ceilings.from_run(run), run.nodes_by_rank

    def possible(
        items: Iterable[T], check: Callable[[T], tuple[T | None, Iterable[Unsound]]]
    ) -> tuple[T, ...]:
        return _filter(items, check, unsound)

    return replace(
        run,
        facts=possible(run.facts, _facts),
        health=possible(run.health, lambda state: _health(state, nodes.get(state.rank))),
        probes=possible(run.probes, _probe),
        locals=possible(run.locals, lambda local: _local(local, nodes.get(local.rank), ceilings)),
        collectives=possible(run.collectives, lambda item: _collective(item, ceilings)),
        pairs=possible(run.pairs, lambda pair: _pair(pair, ceilings)),
        counters=possible(run.counters, _counters),
        unsound=tuple(dict.fromkeys(unsound)),
    )


def sound_pairs(pairs: Iterable[Pair], ceilings: Ceilings) -> tuple[Pair, ...]:
    """Return the pairs whose values are physically possible."""
    return _filter(pairs, lambda pair: _pair(pair, ceilings), [])


def sound_records(records: Iterable[Record]) -> tuple[Record, ...]:
    """Return the records of earlier runs whose values are physically possible."""
    return tuple(item for item in records if not why_impossible(item.value, item.unit, none_above(item.unit)))


def why_impossible(value: float | None, unit: str = "s", ceiling: Ceiling | None = None) -> str | None:
    """Return why a time, or a rate with a ceiling, is impossible; None if it is possible or missing."""
    if value is None:
        return None
    if not math.isfinite(value):
        return "no number"
    if value <= 0:
        return "negative" if value < 0 else "no rate" if ceiling else "no time at all"
    if ceiling is not None and value > ceiling.value:
        return f"more than {ceiling.value:.4g} {unit}, {ceiling.description}"
    return None


def unsound_times(
    seconds: Sequence[float], *, check: str, what: str, node: int, rank: int, dst: int | None = None
) -> list[Unsound]:
    """Report the first impossible time of a rank; empty if all are possible."""
    bad = next(((value, reason) for value in seconds if (reason := why_impossible(value))), None)
    return [] if bad is None else _Source(check, node, rank, dst).bad(what, bad[0], "s", bad[1])


def _filter(
    items: Iterable[T], check: Callable[[T], tuple[T | None, Iterable[Unsound]]], unsound: list[Unsound]
) -> tuple[T, ...]:
    accepted = []
    for item in items:
        cleaned, problems = check(item)
        unsound += problems
        if cleaned is not None:
            accepted.append(cleaned)
    return tuple(accepted)


@dataclass(frozen=True)
class _Source:
    """Source of one record's values, which builds the findings for the impossible ones."""

    check: str
    node: int | None = None
    rank: int | None = None
    dst: int | None = None

    def bad(self, what: str, value: object, unit: str, reason: str | None) -> list[Unsound]:
        if reason is None:
            return []
        text = f"{value:.4g}" if isinstance(value, float) else str(value)
        return [
            Unsound(
                check=self.check,
                what=what,
                value=text,
                unit=unit,
                why=reason,
                node=self.node,
                rank=self.rank,
                dst=self.dst,
            )
        ]


def _negative(value: float | None) -> str | None:
    if value is None or value >= 0:
        return None
    return "no number" if math.isnan(value) else "negative"


def _not_finite(value: float | None) -> str | None:
    return None if value is None or math.isfinite(value) else "no number"


def _facts(fact: Facts) -> tuple[Facts, list[Unsound]]:
    changes: dict[str, Any] = {}
    unsound: list[Unsound] = []
    memlock = None if fact.memlock_bytes == UNLIMITED else fact.memlock_bytes
    for check, field, unit, reason in (
        ("clock", "clock_offset_s", "s", _not_finite(fact.clock_offset_s)),
        ("clock", "clock_offset_error_s", "s", _why_impossible_or_zero(fact.clock_offset_error_s)),
        ("shared-memory", "shm_bytes", "bytes", _negative(fact.shm_bytes)),
        ("memlock", "memlock_bytes", "bytes", _negative(memlock)),
        ("hostname", "hostname_seconds", "s", _why_impossible_or_zero(fact.hostname_seconds)),
        ("host-limits", "cpus", "", why_impossible(fact.cpus)),
        ("host-limits", "load_per_cpu", "", _why_impossible_or_zero(fact.load_per_cpu)),
    ):
        if reason:
            unsound += _Source(check, fact.node, fact.rank).bad(field, getattr(fact, field), unit, reason)
            changes[field] = None
    if "clock_offset_error_s" in changes:  # an offset of unknown error is useless
        changes["clock_offset_s"] = None
    nics = tuple(
        replace(nic, gbps=None) if nic.gbps is not None and why_impossible(nic.gbps) else nic
        for nic in fact.nics
    )
    for nic in fact.nics:
        reason = None if nic.gbps is None else why_impossible(nic.gbps)
        unsound += _Source("interface", fact.node, fact.rank).bad(
            f"rate of {nic.name}", nic.gbps, "Gbit/s", reason
        )
    ports = fact.rdma_ports and tuple(
        replace(port, gbps=None) if why_impossible(port.gbps) else port for port in fact.rdma_ports
    )
    for port in fact.rdma_ports or ():
        source = _Source("rdma", fact.node, fact.rank)
        unsound += source.bad(f"rate of {port.name}", port.gbps, "Gbit/s", why_impossible(port.gbps))
    return (replace(fact, nics=nics, rdma_ports=ports, **changes) if unsound else fact), unsound


def _why_impossible_or_zero(value: float | None) -> str | None:
    """Return why a value is impossible, like :func:`why_impossible`, but allow zero."""
    return None if value == 0 else why_impossible(value)


def _health(state: GpuHealth, node: int | None) -> tuple[GpuHealth, list[Unsound]]:
    source = _Source("gpu-health", node, state.rank)
    reasons = {field: _negative(getattr(state, field)) for field in _COUNTS}
    reasons |= {field: _not_finite(getattr(state, field)) for field in _FLOATS}
    unsound = [
        each
        for name, reason in reasons.items()
        for each in source.bad(name, getattr(state, name), "", reason)
    ]
    changes: dict[str, Any] = {field: None for field, reason in reasons.items() if reason}
    errors = state.nvlink_errors or {}
    for kind, number in errors.items():
        unsound += source.bad(f"NVLink {kind}", number, "", _negative(number))
    if any(number < 0 for number in errors.values()):
        changes["nvlink_errors"] = {kind: number for kind, number in errors.items() if number >= 0}
    return replace(state, **changes), unsound


def _probe(probe: Probe) -> tuple[Probe, list[Unsound]]:
    reason = why_impossible(probe.seconds)
    if reason is None:
        return probe, []
    source = _Source("mesh", probe.src, dst=probe.dst)
    return replace(probe, seconds=None), source.bad("seconds", probe.seconds, "s", reason)


def _local(local: Local, node: int | None, ceilings: Ceilings) -> tuple[Local | None, list[Unsound]]:
    kind = LOCALS.get(local.what)
    if kind is None or local.value is None:
        return local, []
    ceiling = ceilings.local(local.rank, local.what)
    values = (local.value, *local.samples)
    bad = next(
        ((value, reason) for value in values if (reason := why_impossible(value, kind.unit, ceiling))), None
    )
    if bad is None:
        return local, []
    return None, _Source(kind.check, node, local.rank).bad(local.what, bad[0], kind.unit, bad[1])


def _collective(item: Collective, ceilings: Ceilings) -> tuple[Collective, list[Unsound]]:
    """Drop impossible times and rates; the result of the check for correct values stays."""
    rate, ceiling = item.busbw_gbytes_per_s, ceilings.world(item)
    values = (
        (item.seconds_median, "s", why_impossible(item.seconds_median)),
        (item.seconds_p95, "s", why_impossible(item.seconds_p95)),
        (rate, "GB/s", why_impossible(rate, "GB/s", ceiling) if item.ranks > 1 else _not_finite(rate)),
    )
    bad = next(((value, unit, reason) for value, unit, reason in values if reason), None)
    if bad is None:
        return item, []
    small = item.op == "barrier" or item.bytes <= SMALL_BYTES
    source = _Source("latency" if small else "bandwidth")
    cleaned = replace(
        item, seconds_median=None, seconds_p95=None, algbw_gbytes_per_s=None, busbw_gbytes_per_s=None
    )
    return cleaned, source.bad(f"{item.op} of {item.bytes} bytes ({item.dtype})", *bad)


def _pair(pair: Pair, ceilings: Ceilings) -> tuple[Pair | None, list[Unsound]]:
    ceiling = ceilings.pair(pair.src, pair.dst)
    for rate in (pair.gbytes_per_s, pair.gbytes_per_s_p95, *pair.rails):
        if reason := why_impossible(rate, "GB/s", ceiling):
            return None, _Source("pairs", pair.src, dst=pair.dst).bad("bandwidth", rate, "GB/s", reason)
    retransmitted, segments = pair.retransmitted, pair.segments
    reason = _negative(retransmitted) or _negative(segments)
    if reason is None and retransmitted is not None and segments is not None and retransmitted > segments:
        reason = "more than were sent"
    if reason is None:
        return pair, []
    unsound = _Source("loss", pair.src, dst=pair.dst).bad(
        "segments sent again", f"{retransmitted} of {segments}", "", reason
    )
    return replace(pair, segments=None, retransmitted=None), unsound


def _counters(counters: Counters) -> tuple[Counters, list[Unsound]]:
    source = _Source("loss", counters.node)
    unsound: list[Unsound] = []
    changes: dict[str, Any] = {}
    for name in ("tcp_segments", "tcp_retransmitted", "carrier_changes"):
        if reason := _negative(getattr(counters, name)):
            unsound += source.bad(name, getattr(counters, name), "", reason)
            changes[name] = None
    for name in ("rdma_errors", "port_errors"):
        errors: dict[str, int] = getattr(counters, name) or {}
        for port, increase in errors.items():
            unsound += source.bad(port, increase, "", _negative(increase))
        if any(increase < 0 for increase in errors.values()):
            changes[name] = {port: increase for port, increase in errors.items() if increase >= 0}
    return (replace(counters, **changes) if changes else counters), unsound
