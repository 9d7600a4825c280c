"""A figure beside its own past: the median of the last runs that passed on the very same setting.

Pure: records in, an opinion out. Where records are kept is the caller's matter. A changed driver, library or
image is another key, so it starts a new history and is never compared across.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from checklist.measurements import STRICT, Measurements

SCHEMA_VERSION = 1
LAST = 10  # runs that are looked back on
LEAST = 3  # fewer are no history yet
WARN_SHARE, FAIL_SHARE = 0.05, 0.10  # of the median
SPREADS = 3.0  # standard deviations of the past (from its MAD) that a drop must exceed too
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
    """Of the whole run; only PASS counts."""
    setting: Setting
    op: str
    bytes: int | None
    value: float
    unit: str


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
    """The figure beside the last PASS runs with the same key; None where there are fewer than three.

    5 % worse than their median is a warning, 10 % a failure, if it is also outside of the past's own spread.
    """
    past = sorted(
        (
            record
            for record in records
            if record.verdict == "PASS"
            and (record.setting, record.op, record.bytes) == (setting, op, size_bytes)
        ),
        key=lambda record: record.unix,
    )[-LAST:]
    if len(past) < LEAST:
        return None
    values = [record.value for record in past]
    median = statistics.median(values)
    if median <= 0:
        return None
    change = (median - value if less_is_better else value - median) / median
    sigma = MAD_TO_SIGMA * statistics.median(abs(other - median) for other in values) / median
    outside = -change > SPREADS * sigma
    verdict: Literal["PASS", "WARN", "FAIL"] = "PASS"
    if outside and -change > WARN_SHARE:
        verdict = "FAIL" if -change > FAIL_SHARE else "WARN"
    return Past(median=median, runs=len(past), change=change, verdict=verdict)
