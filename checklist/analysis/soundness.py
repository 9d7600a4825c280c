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
    "pcie_generation",
    "pcie_generation_most",
    "pcie_width",
    "pcie_width_most",
    "pcie_replays",
    "nvlinks_active",
    "nvlink_mbytes_per_s",
)
_FLOATS = ("temperature_c", "slowdown_c", "power_w", "power_limit_w", "power_default_w")
T = TypeVar("T")


def sound(measurements: Measurements) -> Measurements:
    """Remove physically impossible values and list each of them in ``unsound``."""
    run, found = measurements, list(measurements.unsound)
    ceilings, nodes = Ceilings.of(run), run.nodes_by_rank

    def kept(items: Iterable[T], look: Callable[[T], tuple[T | None, Iterable[Unsound]]]) -> tuple[T, ...]:
        return _kept(items, look, found)

    return replace(
        run,
        facts=kept(run.facts, _facts),
        health=kept(run.health, lambda state: _health(state, nodes.get(state.rank))),
        probes=kept(run.probes, _probe),
        locals=kept(run.locals, lambda local: _local(local, nodes.get(local.rank), ceilings)),
        collectives=kept(run.collectives, lambda item: _collective(item, ceilings)),
        pairs=kept(run.pairs, lambda pair: _pair(pair, ceilings)),
        counters=kept(run.counters, _counters),
        unsound=tuple(dict.fromkeys(found)),
    )


def sound_pairs(pairs: Iterable[Pair], ceilings: Ceilings) -> tuple[Pair, ...]:
    """Return the pairs whose values are physically possible."""
    return _kept(pairs, lambda pair: _pair(pair, ceilings), [])


def sound_records(records: Iterable[Record]) -> tuple[Record, ...]:
    """Return the records of earlier runs whose values are physically possible."""
    return tuple(item for item in records if not wrong(item.value, item.unit, none_above(item.unit)))


def wrong(value: float | None, unit: str = "s", most: Ceiling | None = None) -> str | None:
    """Return why a time or rate (with ceiling ``most``) is impossible; None if it is possible or missing."""
    if value is None:
        return None
    if not math.isfinite(value):
        return "no number"
    if value <= 0:
        return "negative" if value < 0 else "no rate" if most else "no time at all"
    if most is not None and value > most.value:
        return f"more than {most.value:.4g} {unit}, {most.words}"
    return None


def unsound_times(
    seconds: Sequence[float], *, check: str, what: str, node: int, rank: int, dst: int | None = None
) -> list[Unsound]:
    """Report the first impossible time of a rank; empty if all are possible."""
    bad = next(((one, why) for one in seconds if (why := wrong(one))), None)
    return [] if bad is None else _Source(check, node, rank, dst).bad(what, bad[0], "s", bad[1])


def _kept(
    items: Iterable[T], look: Callable[[T], tuple[T | None, Iterable[Unsound]]], found: list[Unsound]
) -> tuple[T, ...]:
    kept = []
    for item in items:
        left, bad = look(item)
        found += bad
        if left is not None:
            kept.append(left)
    return tuple(kept)


@dataclass(frozen=True)
class _Source:
    """Source of one record's values, which builds the findings for the impossible ones."""

    check: str
    node: int | None = None
    rank: int | None = None
    dst: int | None = None

    def bad(self, what: str, value: object, unit: str, why: str | None) -> list[Unsound]:
        if why is None:
            return []
        text = f"{value:.4g}" if isinstance(value, float) else str(value)
        return [
            Unsound(
                check=self.check,
                what=what,
                value=text,
                unit=unit,
                why=why,
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
    found: list[Unsound] = []
    for check, field, unit, why in (
        ("clock", "clock_offset_s", "s", _not_finite(fact.clock_offset_s)),
        ("clock", "clock_offset_error_s", "s", _wrong_or_zero(fact.clock_offset_error_s)),
        ("shared-memory", "shm_bytes", "bytes", _negative(fact.shm_bytes)),
        ("memlock", "memlock_bytes", "bytes", _negative_limit(fact.memlock_bytes)),
    ):
        if why:
            found += _Source(check, fact.node, fact.rank).bad(field, getattr(fact, field), unit, why)
            changes[field] = None
    if "clock_offset_error_s" in changes:  # an offset of unknown error is useless
        changes["clock_offset_s"] = None
    nics = tuple(
        replace(nic, gbps=None) if nic.gbps is not None and wrong(nic.gbps) else nic for nic in fact.nics
    )
    for nic in fact.nics:
        why = None if nic.gbps is None else wrong(nic.gbps)
        found += _Source("interface", fact.node, fact.rank).bad(
            f"rate of {nic.name}", nic.gbps, "Gbit/s", why
        )
    ports = fact.rdma_ports and tuple(
        replace(port, gbps=None) if wrong(port.gbps) else port for port in fact.rdma_ports
    )
    for port in fact.rdma_ports or ():
        source = _Source("rdma", fact.node, fact.rank)
        found += source.bad(f"rate of {port.name}", port.gbps, "Gbit/s", wrong(port.gbps))
    return (replace(fact, nics=nics, rdma_ports=ports, **changes) if found else fact), found


def _wrong_or_zero(value: float | None) -> str | None:
    """Return as :func:`wrong`, but allow zero."""
    return None if value == 0 else wrong(value)


def _negative_limit(value: int | None) -> str | None:
    return None if value == UNLIMITED else _negative(value)


def _health(state: GpuHealth, node: int | None) -> tuple[GpuHealth, list[Unsound]]:
    source = _Source("gpu-health", node, state.rank)
    whys = {field: _negative(getattr(state, field)) for field in _COUNTS}
    whys |= {field: _not_finite(getattr(state, field)) for field in _FLOATS}
    found = [one for name, why in whys.items() for one in source.bad(name, getattr(state, name), "", why)]
    changes: dict[str, Any] = {field: None for field, why in whys.items() if why}
    errors = state.nvlink_errors or {}
    for kind, number in errors.items():
        found += source.bad(f"NVLink {kind}", number, "", _negative(number))
    if any(number < 0 for number in errors.values()):
        changes["nvlink_errors"] = {kind: number for kind, number in errors.items() if number >= 0}
    return replace(state, **changes), found


def _probe(probe: Probe) -> tuple[Probe, list[Unsound]]:
    why = wrong(probe.seconds)
    if why is None:
        return probe, []
    source = _Source("mesh", probe.src, dst=probe.dst)
    return replace(probe, seconds=None), source.bad("seconds", probe.seconds, "s", why)


def _local(local: Local, node: int | None, ceilings: Ceilings) -> tuple[Local | None, list[Unsound]]:
    kind = LOCALS.get(local.what)
    if kind is None or local.value is None:
        return local, []
    most = ceilings.local(local.rank, local.what)
    values = (local.value, *local.samples)
    bad = next(((value, why) for value in values if (why := wrong(value, kind.unit, most))), None)
    if bad is None:
        return local, []
    return None, _Source(kind.check, node, local.rank).bad(local.what, bad[0], kind.unit, bad[1])


def _collective(item: Collective, ceilings: Ceilings) -> tuple[Collective, list[Unsound]]:
    """Drop impossible times and rates; the result of the check for correct values stays."""
    rate, most = item.busbw_gbytes_per_s, ceilings.world(item)
    values = (
        (item.seconds_median, "s", wrong(item.seconds_median)),
        (item.seconds_p95, "s", wrong(item.seconds_p95)),
        (rate, "GB/s", wrong(rate, "GB/s", most) if item.ranks > 1 else _not_finite(rate)),
    )
    bad = next(((value, unit, why) for value, unit, why in values if why), None)
    if bad is None:
        return item, []
    small = item.op == "barrier" or item.bytes <= SMALL_BYTES
    source = _Source("latency" if small else "bandwidth")
    cleared = replace(
        item, seconds_median=None, seconds_p95=None, algbw_gbytes_per_s=None, busbw_gbytes_per_s=None
    )
    return cleared, source.bad(f"{item.op} of {item.bytes} bytes ({item.dtype})", *bad)


def _pair(pair: Pair, ceilings: Ceilings) -> tuple[Pair | None, list[Unsound]]:
    most = ceilings.pair(pair.src, pair.dst)
    for rate in (pair.gbytes_per_s, pair.gbytes_per_s_p95, *pair.rails):
        if why := wrong(rate, "GB/s", most):
            return None, _Source("pairs", pair.src, dst=pair.dst).bad("bandwidth", rate, "GB/s", why)
    again, sent = pair.retransmitted, pair.segments
    why = _negative(again) or _negative(sent)
    if why is None and again is not None and sent is not None and again > sent:
        why = "more than were sent"
    if why is None:
        return pair, []
    found = _Source("loss", pair.src, dst=pair.dst).bad("segments sent again", f"{again} of {sent}", "", why)
    return replace(pair, segments=None, retransmitted=None), found


def _counters(counted: Counters) -> tuple[Counters, list[Unsound]]:
    source = _Source("loss", counted.node)
    found: list[Unsound] = []
    changes: dict[str, Any] = {}
    for name in ("tcp_segments", "tcp_retransmitted", "carrier_changes"):
        if why := _negative(getattr(counted, name)):
            found += source.bad(name, getattr(counted, name), "", why)
            changes[name] = None
    for name in ("rdma_errors", "port_errors"):
        errors: dict[str, int] = getattr(counted, name) or {}
        for port, grown in errors.items():
            found += source.bad(port, grown, "", _negative(grown))
        if any(grown < 0 for grown in errors.values()):
            changes[name] = {port: grown for port, grown in errors.items() if grown >= 0}
    return (replace(counted, **changes) if changes else counted), found
