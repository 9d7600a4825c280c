"""One run before the judges: its measurements, what they are held against, and how an answer is given."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from checklist.analysis.baseline import Past, Record, Setting, compare_with_past, setting_of
from checklist.analysis.diagnosis import Diagnosis
from checklist.analysis.recurrence import Look
from checklist.judges.thresholds import Key, Table, Threshold
from checklist.measurements import Facts, Measurements, PhaseName
from checklist.result import CheckResult, Figure, Finding, Skipped, Verdict
from estimator import hardware
from estimator.errors import UserError

ORDER: tuple[Verdict, ...] = ("PASS", "NO-VERDICT", "WARN", "FAIL")  # from the best to the worst


Records = list[tuple[str, int | None, float, str]]  # operation, bytes, value, unit


@dataclass(frozen=True, kw_only=True, slots=True)
class Judgement:
    """What one judge says of its check, and what it leaves for the history."""

    result: CheckResult | Skipped
    findings: tuple[Finding, ...] = ()
    records: tuple[tuple[str, int | None, float, str], ...] = ()
    """(operation, bytes, value, unit) for the history."""
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
    looks: tuple[Look, ...] = ()
    """Earlier runs' looks for what comes and goes."""
    system: str | None = None
    """The user's name for this system, asked for first in the table of thresholds."""
    setting: Setting = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "setting", setting_of(self.measurements))

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

    @property
    def leaders(self) -> tuple[Facts, ...]:
        """The facts of each node's first rank."""
        first: dict[int, Facts] = {}
        for fact in sorted(self.facts, key=lambda fact: fact.rank):
            first.setdefault(fact.node, fact)
        return tuple(first[node] for node in sorted(first))

    def name(self, node: int) -> str:
        """A node's name; with its number where two nodes call themselves the same."""
        name = self.measurements.name_of(node)
        same = Counter(self.measurements.name_of(other) for other in self.measurements.nodes)[name] > 1
        return f"{name} (node {node})" if same else name

    def names(self, nodes: Iterable[int]) -> tuple[str, ...]:
        return tuple(self.name(node) for node in sorted(set(nodes)))

    def name_of_rank(self, rank: int) -> str:
        node = self.measurements.node_of(rank)
        return f"rank {rank}" if node is None else self.name(node)

    @property
    def all_names(self) -> tuple[str, ...]:
        return self.names(self.measurements.nodes)

    # ---- what figures are held against

    @property
    def systems(self) -> tuple[str, ...]:
        """The names that thresholds may know this system by, the most telling first."""
        names = [self.system, *(fact.instance_type for fact in self.leaders)]
        for fact in self.leaders:
            gpus = [hardware.find_gpu_by_nvml_name(name) for name in fact.gpu_names]
            names += [gpu.name for gpu in gpus if gpu is not None]
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
        key = Key(
            systems=self.systems,
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

    def same(self, record: Record) -> tuple[Record, ...]:
        """Earlier runs' records of the same figure."""
        key = (record.setting, record.op, record.bytes)
        return tuple(one for one in self.history if (one.setting, one.op, one.bytes) == key)

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
    records: Iterable[tuple[str, int | None, float, str]] = (),
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
    records: Iterable[tuple[str, int | None, float, str]] = (),
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
