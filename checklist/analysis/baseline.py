"""Baselines: comparison of a figure with earlier passing runs of exactly the same setting.

Pure functions of records; the caller stores them. A changed driver, library or image is a different key, so
it starts a new history and is never compared across.

The baseline is fixed, because one that followed the newest runs would also follow a slow decline. It is
replaced by ``STEADY_NIGHTS`` nights on another level without a failure, or by a run with --accept-baseline.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from checklist.measurements import STRICT, Measurements

SCHEMA_VERSION = 1
MAX_RUNS = 10  # maximum number of runs in a baseline
LEAST = 3  # minimum number of runs in a baseline
STEADY_NIGHTS = (
    5  # consecutive nights at another level: a legitimate change, e.g. of firmware or of co-located jobs
)
# Maximum spread of those nights, slowest to fastest: a decline of 1 % a night spreads over 4 %
STEADY = 0.02
WARN_SHARE, FAIL_SHARE = 0.05, 0.10  # drop relative to the median
SPREADS = 3.0  # a drop must also exceed this many standard deviations of the past (from its MAD)
DAY_S = 86_400.0
MAD_TO_SIGMA = 1.4826  # sigma / MAD of a normal distribution


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """Everything a figure depends on except the cluster's health."""

    __pydantic_config__ = STRICT
    hardware: str
    """Machine type and GPUs of the nodes; "CPU" if neither is known."""
    driver: str | None
    library: str
    """Version of NCCL; on CPUs the version of torch, which ships gloo."""
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
    """Verdict of the figure's check; also PASS if the figure had no reference and nothing else failed."""
    setting: Setting
    op: str
    bytes: int | None
    value: float
    unit: str
    accepted: bool = False
    """Whether the history restarts with this record (--accept-baseline)."""
    parts: dict[str, float] = field(default_factory=dict, hash=False)
    """The figure by GPU, node or pair, without those that failed."""
    warned: tuple[str, ...] = ()
    """Parts with verdict WARN; all other parts passed, regardless of the verdict of the whole."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PartLimits:
    """Limits for one GPU, node or pair compared with its own history."""

    warn_share: float
    fail_share: float | None
    """None: history alone never causes a failure."""
    in_a_row: int = 1
    """Number of consecutive runs with this part, including the current one, that must be worse."""


OWN_PAST = PartLimits(warn_share=WARN_SHARE, fail_share=FAIL_SHARE)
# A node's network is rated by its best pair, as within a run: bottleneck.SLIGHT_TAU and TAU
OWN_NETWORK = PartLimits(warn_share=0.08, fail_share=0.2)
# A pair meets passing traffic in 2 % of its measurements; among 1,000 pairs, three times in a row is rare
OWN_PAIR = PartLimits(warn_share=0.08, fail_share=None, in_a_row=3)


@dataclass(frozen=True, kw_only=True, slots=True)
class Baseline:
    """Reference values from earlier runs."""

    values: tuple[float, ...]
    since_unix: float
    before: float | None = None
    """Median of the replaced baseline; None if there was none or the user discarded it."""

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def sigma(self) -> float:
        """Standard deviation (from the MAD) relative to the median."""
        deviation = statistics.median(abs(value - self.median) for value in self.values)
        return MAD_TO_SIGMA * deviation / self.median


@dataclass(frozen=True, kw_only=True, slots=True)
class Past:
    """Result of comparing a figure with its history."""

    median: float
    runs: int
    change: float
    """Relative change against the median; -0.1 is 10 % worse, whether lower or higher is better."""
    verdict: Literal["PASS", "WARN", "FAIL"]


def setting_of(measurements: Measurements) -> Setting:
    """Return the setting of this run, the key of its history."""
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
    """Compare a figure with the baseline of the same key; None if that has fewer than three runs.

    5 % worse than the median is a warning, 10 % a failure, provided it is also outside the baseline's spread.
    """
    comparable = [r for r in records if (r.setting, r.op, r.bytes) == (setting, op, size_bytes)]
    return _past(baseline(comparable), value, OWN_PAST, less_is_better=less_is_better)


def worse_parts(
    records: Iterable[Record], values: Mapping[str, float], limits: PartLimits
) -> dict[str, Past]:
    """Return GPUs, nodes or pairs that are worse than their own baseline; higher is better.

    ``records``: records of the figure from earlier runs; ``values``: this run's figure by part. Empty if more
    than half of the parts are worse: then the cause is common, and the figure of the whole run reports it.
    """
    ordered = sorted(records, key=lambda record: record.unix)
    worst_change: dict[str, float] = {}
    for record in ordered:
        for name, value in record.parts.items():
            worst_change[name] = max(value, worst_change.get(name, value))
    worse = {}
    for name, value in values.items():
        # The median is at most the maximum, which clears most parts without reading every night
        if name not in worst_change or value >= (1 - limits.warn_share) * worst_change[name]:
            continue
        history = part_of(ordered, name)
        recent = history[len(history) - limits.in_a_row + 1 :] if len(history) >= limits.in_a_row else None
        if recent is None:
            continue
        reference = baseline(history[: len(history) - len(recent)])
        pasts = [_past(reference, each, limits) for each in (*(record.value for record in recent), value)]
        if (newest := pasts[-1]) and all(past and past.verdict != "PASS" for past in pasts):
            worse[name] = newest
    return worse if 2 * len(worse) <= len(values) else {}


def part_of(records: Iterable[Record], name: str) -> list[Record]:
    """Return the records of one part. A run in which the part failed contributes none."""
    return [
        replace(
            record,
            value=record.parts[name],
            verdict="WARN" if name in record.warned else "PASS",
            parts={},
            warned=(),
        )
        for record in records
        if name in record.parts
    ]


def _past(
    reference: Baseline | None, value: float, limits: PartLimits, *, less_is_better: bool = False
) -> Past | None:
    if reference is None or len(reference.values) < LEAST:
        return None
    worse = (value - reference.median) if less_is_better else (reference.median - value)
    change = -worse / reference.median
    verdict: Literal["PASS", "WARN", "FAIL"] = "PASS"
    if -change > SPREADS * reference.sigma and -change > limits.warn_share:
        fails = limits.fail_share is not None and -change > limits.fail_share
        verdict = "FAIL" if fails else "WARN"
    return Past(median=reference.median, runs=len(reference.values), change=change, verdict=verdict)


def baseline(records: Iterable[Record]) -> Baseline | None:
    """Derive the baseline from the records of one figure, in order of time; None if no record qualifies."""
    current: Baseline | None = None
    window: list[Record] = []
    for record in sorted(records, key=lambda record: record.unix):
        if record.accepted:
            current, window = None, []
        if record.verdict not in ("PASS", "WARN"):
            window = []  # a failure never becomes the new level
            continue
        window = _nights([*window, record])
        if current is not None and len(current.values) >= LEAST and _settled(window, current):
            values = tuple(item.value for item in window)
            current = Baseline(values=values, since_unix=record.unix, before=current.median)
        elif record.verdict == "PASS":
            if current is None:
                current = Baseline(values=(record.value,), since_unix=record.unix)
            elif len(current.values) < MAX_RUNS:
                current = replace(current, values=(*current.values, record.value))
    return current


def _nights(records: list[Record]) -> list[Record]:
    """Return the newest record of each of the last ``STEADY_NIGHTS`` days (UTC)."""
    by_day = {record.unix // DAY_S: record for record in records}
    return list(by_day.values())[-STEADY_NIGHTS:]


def _settled(nights: list[Record], current: Baseline) -> bool:
    """Return whether the nights form a steady level that differs from the baseline by at least a warning."""
    values = [night.value for night in nights]
    median = statistics.median(values)
    if len(nights) < STEADY_NIGHTS or max(values) - min(values) > STEADY * median:
        return False
    change = abs(median / current.median - 1)
    return change > max(WARN_SHARE, SPREADS * current.sigma)
