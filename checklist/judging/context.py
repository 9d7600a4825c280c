"""Input of the judges (measurements and references) and constructors of their judgments."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from checklist.analysis import expectation
from checklist.analysis.baseline import (
    OWN_PAST,
    PartLimits,
    Past,
    Record,
    Setting,
    compare_with_past,
    setting_of,
    worse_parts,
)
from checklist.analysis.diagnosis import Diagnosis
from checklist.analysis.expectation import Expectation, Wiring
from checklist.analysis.paths import Paths
from checklist.analysis.recurrence import Sightings
from checklist.judging.thresholds import Key, Table, Threshold
from checklist.judging.wiring import machine_of, wiring_of
from checklist.measurements import Facts, Measurements, PhaseName
from checklist.reference import Reference
from checklist.result import CheckResult, Figure, Finding, Skipped, Verdict
from estimator import hardware
from estimator.hardware import Instance

ORDER: tuple[Verdict, ...] = ("PASS", "NO-VERDICT", "WARN", "FAIL")  # from the best to the worst
_MAX_NAMES = 8  # maximum number of names in one title


class Measured(NamedTuple):
    """A figure stored in the history."""

    op: str
    bytes: int | None
    value: float
    unit: str
    parts: Mapping[str, float] = {}
    """The figure by GPU, node or pair, under names that are stable across runs."""


Records = list[Measured]


@dataclass(frozen=True, kw_only=True, slots=True)
class Judgment:
    """Result of one check, plus the figures it adds to the history."""

    result: CheckResult | Skipped
    findings: tuple[Finding, ...] = ()
    records: tuple[Measured, ...] = ()
    diagnosis: Diagnosis | None = None
    """Diagnosis of slow nodes and links, set only by check pairs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgingContext:
    """One run's measurements and their references: thresholds and earlier runs."""

    measurements: Measurements
    table: Table
    history: tuple[Record, ...] = ()
    accept_baseline: bool = False
    """Whether the history is discarded and restarts with this run."""
    pairs_seen: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """Time of the last measurement of each pair of nodes in earlier runs, Unix time."""
    sightings: tuple[Sightings, ...] = ()
    """Records of intermittent faults from earlier runs."""
    system: str | None = None
    """User's name for this system, looked up first in the table of thresholds."""
    expect: float | None = None
    """User's expected busbw of the largest all-reduce over all nodes, GB/s."""
    reference: Reference | None = None
    """Reference host settings from a stored result."""
    reference_node: str | None = None
    """Node of this run whose settings are the reference."""
    setting: Setting = field(init=False)
    leaders: tuple[Facts, ...] = field(init=False)
    """Facts of each node's first rank, by node."""
    nodes_by_rank: dict[int, int] = field(init=False)
    paths: Paths = field(init=False)
    wiring: Wiring = field(init=False)
    _names: dict[int, str] = field(init=False)

    def __post_init__(self) -> None:
        run = self.measurements
        first: dict[int, Facts] = {}
        for fact in sorted(run.facts, key=lambda fact: fact.rank):
            first.setdefault(fact.node, fact)
        names = run.names
        counts = Counter(names.values())
        identity = {
            "setting": setting_of(run),
            "leaders": tuple(first[node] for node in sorted(first)),
            "wiring": wiring_of(run, tuple(first[node] for node in sorted(first))),
            "nodes_by_rank": run.nodes_by_rank,
            "paths": Paths.from_facts(first.values(), max((run.nodes_asked - 1, *first)) + 1),
            "_names": {n: f"{name} (node {n})" if counts[name] > 1 else name for n, name in names.items()},
        }
        for name, value in identity.items():
            object.__setattr__(self, name, value)

    # ---- nodes and ranks

    @property
    def facts(self) -> tuple[Facts, ...]:
        return self.measurements.facts

    @property
    def cuda(self) -> bool:
        return self.measurements.device == "cuda"

    @property
    def finished_unix(self) -> float:
        return self.measurements.started_unix + self.measurements.seconds

    @property
    def local(self) -> bool:
        return self.measurements.local

    def name(self, node: int) -> str:
        """Return a node's name, with its number if two nodes have the same name."""
        return self._names.get(node) or self.measurements.hosts.get(node) or f"node {node}"

    def names(self, nodes: Iterable[int]) -> tuple[str, ...]:
        return tuple(self.name(node) for node in sorted(set(nodes)))

    def name_of_rank(self, rank: int) -> str:
        node = self.nodes_by_rank.get(rank)
        return f"rank {rank}" if node is None else self.name(node)

    @property
    def all_names(self) -> tuple[str, ...]:
        return tuple(self._names[node] for node in sorted(self._names))

    @property
    def gpus(self) -> dict[str, tuple[str, ...]]:
        """Return the UUIDs of the GPUs used by each node's ranks."""
        by_node: dict[str, tuple[str, ...]] = {}
        for fact in self.facts:
            name, uuids = self._names[fact.node], fact.gpu_uuids[fact.local_rank :][:1]
            by_node[name] = (*by_node.get(name, ()), *uuids)
        return by_node

    # ---- references

    def systems(self, instance_type: str | None, gpu_names: Iterable[str]) -> tuple[str, ...]:
        """Return the names of a machine or GPU in the table of thresholds, most specific first."""
        gpus = [hardware.find_gpu_by_nvml_name(name) for name in dict.fromkeys(gpu_names)]
        names = [self.system, instance_type, *(gpu.name for gpu in gpus if gpu is not None)]
        return tuple(dict.fromkeys(name for name in names if name))

    @property
    def several_gpu_nodes(self) -> bool:
        """Whether the run was to measure a network between GPU nodes."""
        return self.cuda and not self.local and len(self.leaders) > 1

    def expectation(
        self, op: str, size_bytes: int | None, algorithm: str | None = None, *, largest: bool = False
    ) -> Expectation | None:
        """Return the expected range of a bandwidth; None if the wiring or the operation is unknown.

        ``largest``: whether it is the largest message of the operation, to which --expect applies.
        """
        if self.local or size_bytes is None or not self.leaders:
            return None
        if self.expect is not None and op == "all_reduce" and largest:
            return expectation.user_expectation(self.expect)
        if not self.cuda and op != expectation.PAIR:
            return None  # no figures of gloo's collectives are published
        return expectation.expect(self.wiring, op, size_bytes, algorithm)

    def threshold(self, op: str, size_bytes: int | None, algorithm: str | None = None) -> Threshold | None:
        """Return the threshold of an operation over all nodes; for mixed kinds, the lowest of theirs.

        None if any kind has none, because that kind may be the slowest.
        """
        kinds = dict.fromkeys((fact.instance_type, fact.gpu_names) for fact in self.leaders)
        rows = [self._row(self.systems(*kind), op, size_bytes, algorithm) for kind in kinds]
        applicable = [row for row in rows if row is not None]
        return (
            min(applicable, key=lambda row: row.floor)
            if applicable and len(applicable) == len(rows)
            else None
        )

    def thresholds_by_rank(self, op: str) -> dict[int, Threshold]:
        """Return the threshold of each rank's own figure, by its machine and GPU."""
        rows: dict[tuple[str | None, tuple[str, ...]], Threshold | None] = {}
        thresholds = {}
        for fact in self.facts:
            kind = (fact.instance_type, fact.gpu_names[fact.local_rank :][:1])
            if kind not in rows:
                rows[kind] = self._row(self.systems(*kind), op, None)
            row = rows[kind]
            if row is not None:
                thresholds[fact.rank] = row
        return thresholds

    def _row(
        self, systems: tuple[str, ...], op: str, size_bytes: int | None, algorithm: str | None = None
    ) -> Threshold | None:
        key = Key(
            systems=systems,
            op=op,
            bytes=size_bytes,
            algorithm=algorithm,
            gpus=self.measurements.gpus_per_node_asked if self.cuda else None,
            nodes=len(self.measurements.nodes),
        )
        return self.table.find(key) if key.systems else None

    def past(
        self, op: str, size_bytes: int | None, value: float, *, less_is_better: bool = False
    ) -> Past | None:
        if self.accept_baseline:
            return None
        return compare_with_past(
            self.history, self.setting, op, size_bytes, value, less_is_better=less_is_better
        )

    def worse_parts(
        self, op: str, size_bytes: int | None, values: Mapping[str, float], limits: PartLimits = OWN_PAST
    ) -> dict[str, Past]:
        """Return GPUs, nodes or pairs whose figure is worse than their own history."""
        if self.accept_baseline:
            return {}
        return worse_parts(self._records_of(self.setting, op, size_bytes), values, limits)

    def _records_of(self, *key: object) -> tuple[Record, ...]:
        """Return the records of one figure (setting, op, bytes) from earlier runs."""
        return tuple(record for record in self.history if (record.setting, record.op, record.bytes) == key)

    def same(self, record: Record) -> tuple[Record, ...]:
        """Return the records of the same figure from earlier runs."""
        return self._records_of(record.setting, record.op, record.bytes)

    @property
    def machine(self) -> Instance | None:
        """Return the machine type of all nodes; None for several or unlisted types."""
        return machine_of(self.leaders)

    # ---- judgments

    def ran(self, phase: PhaseName) -> bool:
        """Return whether the phase finished."""
        run = self.measurements.phase(phase)
        return run is not None and run.status == "done"

    def unmeasured(self, check: str, phase: PhaseName) -> Judgment:
        """Return NO-VERDICT with the phase's own reason."""
        run = self.measurements.phase(phase)
        if run is None:
            reason = f"phase {phase} did not run"
        elif run.status == "done":
            reason = f"phase {phase} did not measure it"
        else:
            reason = f"phase {phase} {run.status}" + (f": {run.reason}" if run.reason else "")
        return no_verdict(check, f"Not measured: {reason}.")


def decide(
    check: str,
    passed: str,
    findings: Iterable[Finding] = (),
    *,
    nodes: Iterable[str] = (),
    figures: Iterable[Figure] = (),
    records: Iterable[Measured] = (),
) -> Judgment:
    """Return PASS with ``passed`` as the reason, or the worst finding."""
    all_findings = tuple(findings)
    worst = worst_of([finding.verdict for finding in all_findings])
    titles = [finding.title for finding in all_findings if finding.verdict == worst]
    reason = (
        passed if not titles else titles[0] + (f" And {len(titles) - 1} more." if len(titles) > 1 else "")
    )
    result = CheckResult(
        check=check, verdict=worst, reason=reason, measured=True, nodes=tuple(nodes), figures=tuple(figures)
    )
    return Judgment(result=result, findings=all_findings, records=tuple(records))


def no_verdict(
    check: str,
    reason: str,
    *,
    measured: bool = False,
    nodes: Iterable[str] = (),
    figures: Iterable[Figure] = (),
    findings: Iterable[Finding] = (),
    records: Iterable[Measured] = (),
) -> Judgment:
    """Return NO-VERDICT: not measured, or measured without a reference."""
    result = CheckResult(
        check=check,
        verdict="NO-VERDICT",
        reason=reason,
        measured=measured,
        nodes=tuple(nodes),
        figures=tuple(figures),
    )
    return Judgment(result=result, findings=tuple(findings), records=tuple(records))


def skipped(check: str, reason: str) -> Judgment:
    """Return the judgment of a check that does not apply, for ``reason``."""
    return Judgment(result=Skipped(check=check, reason=reason))


def worst_of(verdicts: Iterable[Verdict]) -> Verdict:
    """Return the worst verdict; PASS if there are none."""
    return max(verdicts, key=ORDER.index, default="PASS")


def shorten(names: tuple[str, ...]) -> str:
    """Format names, shortened to the first few if there are many."""
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return ", ".join(names[:_MAX_NAMES]) + more
