"""One run before the judges: its measurements, what they are held against, and how an answer is given."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

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
from checklist.analysis.paths import Paths
from checklist.analysis.recurrence import Look
from checklist.judges.thresholds import Key, Table, Threshold
from checklist.measurements import Facts, Measurements, PhaseName
from checklist.reference import Reference
from checklist.result import CheckResult, Figure, Finding, Skipped, Verdict
from estimator import hardware
from estimator.errors import UserError

ORDER: tuple[Verdict, ...] = ("PASS", "NO-VERDICT", "WARN", "FAIL")  # from the best to the worst
_MOST_NAMES = 8  # in one title


class Measured(NamedTuple):
    """A figure for the history of later runs."""

    op: str
    bytes: int | None
    value: float
    unit: str
    parts: Mapping[str, float] = {}
    """The same by GPU, node or pair, under names that stay from run to run."""


Records = list[Measured]


@dataclass(frozen=True, kw_only=True, slots=True)
class Judgement:
    """What one judge says of its check, and what it leaves for the history."""

    result: CheckResult | Skipped
    findings: tuple[Finding, ...] = ()
    records: tuple[Measured, ...] = ()
    diagnosis: Diagnosis | None = None
    """Who among the nodes is slow with whom, from the one judge that compares them pair by pair."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgingContext:
    """One run before the judges, and what it is compared with: thresholds, earlier runs."""

    measurements: Measurements
    table: Table
    history: tuple[Record, ...] = ()
    accept_baseline: bool = False
    """Whether the past is given up and starts anew with this run."""
    pairs_seen: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """When earlier runs have measured a pair of nodes last, Unix time."""
    looks: tuple[Look, ...] = ()
    """Earlier runs' looks for what comes and goes."""
    system: str | None = None
    """The user's name for this system, asked for first in the table of thresholds."""
    reference: Reference | None = None
    """Settings of hosts that are right, from a kept result."""
    reference_node: str | None = None
    """The node of this run whose settings are right."""
    setting: Setting = field(init=False)
    leaders: tuple[Facts, ...] = field(init=False)
    """The facts of each node's first rank, by node."""
    nodes_by_rank: dict[int, int] = field(init=False)
    paths: Paths = field(init=False)
    _names: dict[int, str] = field(init=False)

    def __post_init__(self) -> None:
        run = self.measurements
        first: dict[int, Facts] = {}
        for fact in sorted(run.facts, key=lambda fact: fact.rank):
            first.setdefault(fact.node, fact)
        names = run.names
        same = Counter(names.values())
        told = {
            "setting": setting_of(run),
            "leaders": tuple(first[node] for node in sorted(first)),
            "nodes_by_rank": run.nodes_by_rank,
            "paths": Paths.of(first.values(), max((run.nodes_asked - 1, *first)) + 1),
            "_names": {n: f"{name} (node {n})" if same[name] > 1 else name for n, name in names.items()},
        }
        for name, value in told.items():
            object.__setattr__(self, name, value)

    # ---- who is who

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
        """A node's name; with its number where two nodes call themselves the same."""
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
        """By node, the UUIDs of the GPUs that its ranks use."""
        by_node: dict[str, tuple[str, ...]] = {}
        for fact in self.facts:
            name, own = self._names[fact.node], fact.gpu_uuids[fact.local_rank :][:1]
            by_node[name] = (*by_node.get(name, ()), *own)
        return by_node

    # ---- what figures are held against

    def systems(self, instance_type: str | None, gpu_names: Iterable[str]) -> tuple[str, ...]:
        """The names that thresholds may know such a machine or GPU by, the most telling first."""
        gpus = [hardware.find_gpu_by_nvml_name(name) for name in dict.fromkeys(gpu_names)]
        names = [self.system, instance_type, *(gpu.name for gpu in gpus if gpu is not None)]
        names += [f"TCP {rate:g} Gbit/s" for rate in self._socket_rates()]
        return tuple(dict.fromkeys(name for name in names if name))

    def _socket_rates(self) -> list[float]:
        """Line rates of the interfaces that plain sockets use; nothing where RDMA is used."""
        transport = self.measurements.transport
        if self.local or (
            self.measurements.backend == "nccl" and (transport is None or transport.network != "socket")
        ):
            return []
        rates = [nic.gbps for fact in self.leaders for nic in fact.nics if nic.name == fact.nic and nic.gbps]
        return [min(rates)] if rates and len(rates) == len(self.leaders) else []

    def threshold(self, op: str, size_bytes: int | None, algorithm: str | None = None) -> Threshold | None:
        """Of what all nodes do together: where they are of several kinds, the lowest of all of theirs.

        None where one kind has none: that one may be the slower.
        """
        kinds = dict.fromkeys((fact.instance_type, fact.gpu_names) for fact in self.leaders)
        rows = [self._row(self.systems(*kind), op, size_bytes, algorithm) for kind in kinds]
        known = [row for row in rows if row is not None]
        return min(known, key=lambda row: row.floor) if known and len(known) == len(rows) else None

    def thresholds_by_rank(self, op: str) -> dict[int, Threshold]:
        """Of a figure that each rank measures alone, by its own machine and its own GPU."""
        rows: dict[tuple[str | None, tuple[str, ...]], Threshold | None] = {}
        found = {}
        for fact in self.facts:
            kind = (fact.instance_type, fact.gpu_names[fact.local_rank :][:1])
            if kind not in rows:
                rows[kind] = self._row(self.systems(*kind), op, None)
            row = rows[kind]
            if row is not None:
                found[fact.rank] = row
        return found

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
        """GPUs, nodes or pairs whose figure is worse than their own past."""
        if self.accept_baseline:
            return {}
        return worse_parts(self._of(self.setting, op, size_bytes), values, limits)

    def _of(self, *key: object) -> tuple[Record, ...]:
        """Earlier runs' records of one figure: setting, op, bytes."""
        return tuple(one for one in self.history if (one.setting, one.op, one.bytes) == key)

    def same(self, record: Record) -> tuple[Record, ...]:
        """Earlier runs' records of the same figure."""
        return self._of(record.setting, record.op, record.bytes)

    @property
    def machine_gpus(self) -> int | None:
        """How many GPUs the machine type has, where there is one type and the table knows it."""
        kinds = {fact.instance_type for fact in self.leaders}
        kind = kinds.pop() if len(kinds) == 1 else None
        try:
            return None if kind is None else hardware.instance(kind).gpu_count
        except UserError:  # a type that no table lists
            return None

    @property
    def machine_fabric(self) -> str:
        """What the table says of the machine type's network; empty: unknown."""
        kinds = {fact.instance_type for fact in self.leaders}
        kind = kinds.pop() if len(kinds) == 1 else None
        try:
            return "" if kind is None else hardware.instance(kind).fabric
        except UserError:
            return ""

    # ---- answers

    def ran(self, phase: PhaseName) -> bool:
        """Whether that phase came to its end."""
        run = self.measurements.phase(phase)
        return run is not None and run.status == "done"

    def unmeasured(self, check: str, phase: PhaseName) -> Judgement:
        """NO-VERDICT, with what the phase says of itself."""
        run = self.measurements.phase(phase)
        if run is None:
            why = f"phase {phase} did not run"
        elif run.status == "done":
            why = f"phase {phase} has measured nothing of it"
        else:
            why = f"phase {phase} {run.status}" + (f": {run.reason}" if run.reason else "")
        return no_verdict(check, f"Not measured: {why}.")


def answer(
    check: str,
    good: str,
    findings: Iterable[Finding] = (),
    *,
    nodes: Iterable[str] = (),
    figures: Iterable[Figure] = (),
    records: Iterable[Measured] = (),
) -> Judgement:
    """PASS with ``good`` as the reason, or the worst finding."""
    given = tuple(findings)
    worst = worst_of([finding.verdict for finding in given])
    titles = [finding.title for finding in given if finding.verdict == worst]
    reason = good if not titles else titles[0] + (f" And {len(titles) - 1} more." if len(titles) > 1 else "")
    result = CheckResult(
        check=check, verdict=worst, reason=reason, measured=True, nodes=tuple(nodes), figures=tuple(figures)
    )
    return Judgement(result=result, findings=given, records=tuple(records))


def no_verdict(
    check: str,
    reason: str,
    *,
    measured: bool = False,
    nodes: Iterable[str] = (),
    figures: Iterable[Figure] = (),
    findings: Iterable[Finding] = (),
    records: Iterable[Measured] = (),
) -> Judgement:
    """NO-VERDICT: not measured, or measured with nothing to compare with."""
    result = CheckResult(
        check=check,
        verdict="NO-VERDICT",
        reason=reason,
        measured=measured,
        nodes=tuple(nodes),
        figures=tuple(figures),
    )
    return Judgement(result=result, findings=tuple(findings), records=tuple(records))


def skipped(check: str, reason: str) -> Judgement:
    """The judgement of a check that does not apply here; ``reason`` says why."""
    return Judgement(result=Skipped(check=check, reason=reason))


def worst_of(verdicts: Iterable[Verdict]) -> Verdict:
    """The worst of them; PASS where there are none."""
    return max(verdicts, key=ORDER.index, default="PASS")


def few(names: tuple[str, ...]) -> str:
    """Names, of many the first ones."""
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more
