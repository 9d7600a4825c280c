"""A figure beside its own past: a baseline of runs on the very same setting whose check passed.

Pure: records in, an opinion out. Where records are kept is the caller's matter. A changed driver, library or
image is another key, so it starts a new history and is never compared across.

The baseline stays what it was: one that followed the newest runs would follow a slow decline too. It is
replaced by ``STEADY_NIGHTS`` nights on another level that is no failure, or by a run that was made with
--accept-baseline.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from checklist.measurements import STRICT, Measurements

SCHEMA_VERSION = 1
MOST = 10  # runs that make a baseline
LEAST = 3  # fewer are no history yet
STEADY_NIGHTS = 5  # in a row at another level: a lawful change, as of firmware or of what runs beside
# From the slowest to the fastest of those nights: a decline of 1 % a night spreads over 4 %
STEADY = 0.02
WARN_SHARE, FAIL_SHARE = 0.05, 0.10  # of the median
SPREADS = 3.0  # standard deviations of the past (from its MAD) that a drop must exceed too
DAY_S = 86_400.0
MAD_TO_SIGMA = 1.4826  # of a normal distribution


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """All that a figure depends on apart from the cluster's health."""

    __pydantic_config__ = STRICT
    hardware: str
    """Machine type and GPUs of the nodes; "CPU" where there is neither."""
    driver: str | None
    library: str
    """NCCL's version; on CPUs torch's, which brings gloo."""
    image: str | None
    nodes: int
    ranks: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """One figure of one finished run."""

    __pydantic_config__ = STRICT
    version: int = SCHEMA_VERSION
    unix: float
    verdict: Literal["PASS", "WARN", "FAIL", "NO-VERDICT"]
    """Of its check; PASS too where a figure had nothing to be held against, and nothing else failed."""
    setting: Setting
    op: str
    bytes: int | None
    value: float
    unit: str
    accepted: bool = False
    """Whether the past starts anew with it, as --accept-baseline says."""
    parts: dict[str, float] = field(default_factory=dict, hash=False)
    """The same figure by GPU, node or pair, but for those that failed."""
    warned: tuple[str, ...] = ()
    """Parts of which the run has said WARN; the others have passed, whatever it says of the whole."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PartLimits:
    """When one GPU, node or pair is worse than its own past."""

    warn_share: float
    fail_share: float | None
    """None: it never fails by its past alone."""
    in_a_row: int = 1
    """So many runs of those that measured it must be worse, this one among them."""


OWN_PAST = PartLimits(warn_share=WARN_SHARE, fail_share=FAIL_SHARE)
# A node's network by its best pair, as within a run: bottleneck.SLIGHT_TAU and TAU
OWN_NETWORK = PartLimits(warn_share=0.08, fail_share=0.2)
# One pair meets passing traffic in 2 % of its measurements; among 1,000 pairs three times in a row is rare
OWN_PAIR = PartLimits(warn_share=0.08, fail_share=None, in_a_row=3)


@dataclass(frozen=True, kw_only=True, slots=True)
class Baseline:
    """What a figure is held against."""

    values: tuple[float, ...]
    since_unix: float
    before: float | None = None
    """The median of the one that it has replaced; None: there was none, or it was given up by hand."""

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def sigma(self) -> float:
        """The spread of its values over their median."""
        off = statistics.median(abs(value - self.median) for value in self.values)
        return MAD_TO_SIGMA * off / self.median


@dataclass(frozen=True, kw_only=True, slots=True)
class Past:
    """What the past says of a figure."""

    median: float
    runs: int
    change: float
    """Of the figure against the median: -0.1 is a tenth worse, whichever way worse is."""
    verdict: Literal["PASS", "WARN", "FAIL"]


def setting_of(measurements: Measurements) -> Setting:
    """What this run's figures are to be compared with."""
    facts = measurements.facts
    kinds = sorted(
        {", ".join(filter(None, (fact.instance_type, *sorted(set(fact.gpu_names))))) for fact in facts}
    )
    versions: Mapping[str, str | None] = facts[0].versions if facts else {}
    nccl = measurements.backend == "nccl"
    return Setting(
        hardware="; ".join(kind for kind in kinds if kind) or "CPU",
        driver=versions.get("driver"),
        library=f"nccl {versions.get('nccl')}" if nccl else f"torch {versions.get('torch')}",
        image=versions.get("image"),
        nodes=len(measurements.nodes),
        ranks=len(facts),
    )


def compare_with_past(
    records: Iterable[Record],
    setting: Setting,
    op: str,
    size_bytes: int | None,
    value: float,
    *,
    less_is_better: bool = False,
) -> Past | None:
    """The figure beside the baseline of the same key; None where that is of fewer than three runs.

    5 % worse than its median is a warning, 10 % a failure, if it is outside of the baseline's own spread too.
    """
    same = [r for r in records if (r.setting, r.op, r.bytes) == (setting, op, size_bytes)]
    return _past(baseline(same), value, OWN_PAST, less_is_better=less_is_better)


def worse_parts(same: Iterable[Record], values: Mapping[str, float], limits: PartLimits) -> dict[str, Past]:
    """GPUs, nodes or pairs that are worse than the baseline of their own figures; more is better.

    ``same`` are earlier runs' records of that figure, ``values`` this run's by part. None where it is more
    than half of them: what has become slower then is common to all, and the figure of the whole tells it.
    """
    every = sorted(same, key=lambda record: record.unix)
    most: dict[str, float] = {}
    for record in every:
        for name, value in record.parts.items():
            most[name] = max(value, most.get(name, value))
    worse = {}
    for name, value in values.items():
        # A median is no more than the most: without a look at each night most parts are cleared by that
        if name not in most or value >= (1 - limits.warn_share) * most[name]:
            continue
        own = part_of(every, name)
        latest = own[len(own) - limits.in_a_row + 1 :] if len(own) >= limits.in_a_row else None
        if latest is None:
            continue
        against = baseline(own[: len(own) - len(latest)])
        pasts = [_past(against, one, limits) for one in (*(record.value for record in latest), value)]
        if (newest := pasts[-1]) and all(past and past.verdict != "PASS" for past in pasts):
            worse[name] = newest
    return worse if 2 * len(worse) <= len(values) else {}


def part_of(same: Iterable[Record], name: str) -> list[Record]:
    """The records of one part alone. A run in which it failed has none."""
    return [
        replace(
            record,
            value=record.parts[name],
            verdict="WARN" if name in record.warned else "PASS",
            parts={},
            warned=(),
        )
        for record in same
        if name in record.parts
    ]


def _past(
    against: Baseline | None, value: float, limits: PartLimits, *, less_is_better: bool = False
) -> Past | None:
    if against is None or len(against.values) < LEAST:
        return None
    worse = (value - against.median) if less_is_better else (against.median - value)
    change = -worse / against.median
    verdict: Literal["PASS", "WARN", "FAIL"] = "PASS"
    if -change > SPREADS * against.sigma and -change > limits.warn_share:
        fails = limits.fail_share is not None and -change > limits.fail_share
        verdict = "FAIL" if fails else "WARN"
    return Past(median=against.median, runs=len(against.values), change=change, verdict=verdict)


def baseline(same: Iterable[Record]) -> Baseline | None:
    """What records of one figure add up to, in the order of time; None where none of them counts."""
    found: Baseline | None = None
    steady: list[Record] = []
    for record in sorted(same, key=lambda record: record.unix):
        if record.accepted:
            found, steady = None, []
        if record.verdict not in ("PASS", "WARN"):
            steady = []  # a failure is no level to settle on
            continue
        steady = _nights([*steady, record])
        if found is not None and len(found.values) >= LEAST and _settled(steady, found):
            values = tuple(one.value for one in steady)
            found = Baseline(values=values, since_unix=record.unix, before=found.median)
        elif record.verdict == "PASS" and (found is None or len(found.values) < MOST):
            found = _with(found, record)
    return found


def _with(found: Baseline | None, record: Record) -> Baseline:
    if found is None:
        return Baseline(values=(record.value,), since_unix=record.unix)
    return replace(found, values=(*found.values, record.value))


def _nights(records: list[Record]) -> list[Record]:
    """The newest of each day (UTC), of the last few days."""
    by_day = {record.unix // DAY_S: record for record in records}
    return list(by_day.values())[-STEADY_NIGHTS:]


def _settled(nights: list[Record], found: Baseline) -> bool:
    """Whether those nights are a level of their own, as far from the baseline as a warning is or further."""
    values = [night.value for night in nights]
    middle = statistics.median(values)
    if len(nights) < STEADY_NIGHTS or max(values) - min(values) > STEADY * middle:
        return False
    away = abs(middle / found.median - 1)
    return away > max(WARN_SHARE, SPREADS * found.sigma)
