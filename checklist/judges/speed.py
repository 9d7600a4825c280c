"""Whether figures are as they should be: an absolute floor first, then the peers, then their own past."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from checklist.analysis.baseline import Past
from checklist.checks import LOCALS
from checklist.judges.advice import finding
from checklist.judges.context import Answer, Case, Records, answer, no_verdict, skipped
from checklist.judges.thresholds import Threshold
from checklist.measurements import NO_FOLDER, Local
from checklist.result import Figure, Finding

CHECKS = ("gemm", "hbm", "host-copy", "peer-copy", "storage", "datastore")  # those that node_check judges
PEERS = 4  # fewer values have no outlier
OUTLIER = (
    -3.5
)  # modified z-score (Iglewicz and Hoaglin); alone it flags 8 to 12 % of healthy fleets of 4 to 8
Z_OF_MAD = 0.6745
PEERS_WARN, PEERS_FAIL = 0.95, 0.90  # of the median, as with history
Level = Literal["PASS", "WARN", "FAIL"]
Basis = Literal["floor", "peers", "history", "none"]


@dataclass(frozen=True, slots=True)
class Held:
    """A figure held against what it should be."""

    level: Level | None = None
    """None: there was nothing to hold it against."""
    expected: float | None = None
    basis: Basis = "none"
    source: str | None = None
    words: str = ""
    """What is wrong, to follow the figure in a sentence."""

    @property
    def code(self) -> str:
        """The advice for it."""
        return {"floor": "below-floor", "peers": "straggler"}.get(self.basis, "below-history")

    def figure(
        self,
        name: str,
        value: float,
        unit: str,
        *,
        size_bytes: int | None = None,
        node: str | None = None,
        rank: int | None = None,
    ) -> Figure:
        return Figure(
            name=name,
            value=value,
            unit=unit,
            verdict=self.level or "NO-VERDICT",
            bytes=size_bytes,
            node=node,
            rank=rank,
            expected=self.expected,
            basis=self.basis,
            source=self.source,
        )


def hold(
    value: float,
    threshold: Threshold | None = None,
    beside: tuple[Level, float] | None = None,
    past: Past | None = None,
) -> Held:
    """The first of floor, peers (verdict and median) and past that finds fault, else the first there is."""
    held = [
        found
        for found in (_by_floor(value, threshold), _by_peers(value, beside), by_past(past))
        if found.level is not None
    ]
    at_fault = (found for found in held if found.level != "PASS")
    return next(at_fault, held[0] if held else Held())


def _by_floor(value: float, threshold: Threshold | None) -> Held:
    if threshold is None:
        return Held()
    level: Level = "PASS"
    words = ""
    if value < threshold.floor:
        level, words = "FAIL", f"below the floor {threshold.floor:g} ({threshold.kind})"
    elif threshold.warn is not None and value < threshold.warn:
        level, words = "WARN", f"below what is usual, {threshold.warn:g}"
    return Held(level, threshold.floor, "floor", threshold.origin, words)


def _by_peers(value: float, beside: tuple[Level, float] | None) -> Held:
    if beside is None:
        return Held()
    level, median = beside
    return Held(level, median, "peers", None, f"{1 - value / median:.0%} below its peers" if median else "")


def by_past(past: Past | None) -> Held:
    """A figure held against its own past alone."""
    if past is None:
        return Held()
    words = f"{-past.change:.0%} worse than its past, {past.median:.4g}"
    return Held(past.verdict, past.median, "history", None, words)


def peers(values: Sequence[float]) -> list[Literal["PASS", "WARN", "FAIL"]] | None:
    """Each value beside the others; more is better. None: too few to say anything.

    An outlier by the median absolute deviation that is also more than 5 % below the median; more than 10 %
    fails.
    """
    if len(values) < PEERS:
        return None
    median = statistics.median(values)
    mad = statistics.median(abs(value - median) for value in values)
    verdicts: list[Literal["PASS", "WARN", "FAIL"]] = []
    for value in values:
        outside = value < median and (mad == 0 or Z_OF_MAD * (value - median) / mad < OUTLIER)
        if outside and value < PEERS_WARN * median:
            verdicts.append("FAIL" if value < PEERS_FAIL * median else "WARN")
        else:
            verdicts.append("PASS")
    return verdicts


def node_check(check: str) -> Callable[[Case], Answer]:
    """The judge of one of the checks of single nodes."""
    return lambda case: _node_check(case, check)


def _node_check(case: Case, check: str) -> Answer:
    kinds = [kind for kind in LOCALS.values() if kind.check == check]
    mine = [local for local in case.measurements.locals if local.what in {kind.name for kind in kinds}]
    if not mine:
        why = _does_not_apply(case, check)
        if check == "datastore" and case.ran("node"):
            return no_verdict(check, "Not measured: no datastore was named (--datastore).")
        return skipped(check, why) if why else case.unmeasured(check, "node")
    stores = check in ("storage", "datastore")
    found = _failed(case, check, [local for local in mine if local.value is None], stores=stores)
    figures: list[Figure] = []
    records: Records = []
    for kind in kinds:
        same = [local for local in mine if local.what == kind.name and local.value is not None]
        if same:
            figures += _judge_locals(case, check, same, found)
            # The slowest: what a job over all of them feels, and what a single bad one moves
            records.append((kind.name, None, min(float(local.value or 0) for local in same), kind.unit))
    nodes = case.names(node for local in mine if (node := case.measurements.node_of(local.rank)) is not None)
    # That storage could be written and read is an answer by itself, however fast it was
    if found or stores or any(figure.basis != "none" for figure in figures):
        names = ", ".join(dict.fromkeys(figure.name for figure in figures if "," not in figure.name))
        good = f"{names}: {'done without error' if stores else 'as expected'}."
        good += "".join(
            f" Note: {note}." for note in dict.fromkeys(local.note for local in mine if local.note)
        )
        return answer(check, good, found, nodes=nodes, figures=figures, records=records)
    why = (
        "on CPUs it depends on what else runs"
        if not case.cuda
        else "no threshold, fewer than 4 peers, no history"
    )
    return no_verdict(
        check,
        f"Measured, with nothing to compare with: {why}.",
        measured=True,
        nodes=nodes,
        figures=figures,
        records=records,
    )


def _failed(case: Case, check: str, failed: list[Local], *, stores: bool) -> list[Finding]:
    """What could not be measured. ``stores`` are shared: their failure may be nobody's own."""
    found: list[Finding] = []
    missing: dict[str, list[Local]] = {}
    for local in failed:
        if (local.error or "").startswith(NO_FOLDER):
            missing.setdefault((local.error or "").removeprefix(NO_FOLDER).strip(), []).append(local)
            continue
        name = case.name_of_rank(local.rank)
        title = (
            f"{local.what} could not be measured by rank {local.rank} ({name}): "
            f"{local.error or 'no reason known'}."
        )
        code, blamed, suspects = ("storage-failed", [], [name]) if stores else ("local-failed", [name], [])
        found.append(finding(check, code, "FAIL", title, nodes=blamed, suspects=suspects, ranks=[local.rank]))
    for folder, without in missing.items():
        names = list(dict.fromkeys(case.name_of_rank(local.rank) for local in without))
        title = f"The folder {folder} ({check}) is not there on {', '.join(names)}."
        ranks = [local.rank for local in without]
        found.append(finding(check, "no-folder", "FAIL", title, suspects=names, ranks=ranks, folder=folder))
    return found


def _does_not_apply(case: Case, check: str) -> str | None:
    if not case.cuda and check in ("host-copy", "peer-copy"):
        return "The run uses no GPUs."
    if check == "peer-copy" and case.measurements.gpus_per_node_asked < 2:
        return "There is one GPU on each node."
    return None


def _judge_locals(case: Case, check: str, same: list[Local], found: list[Finding]) -> list[Figure]:
    """One kind of figure over all ranks, and its slowest over time. Findings are added to ``found``."""
    values = [float(local.value or 0) for local in same]
    what, unit = same[0].what, same[0].unit
    threshold = case.threshold(what, None)
    # A file system is shared, so that one rank's speed says little of its node
    beside = peers(values) if case.cuda and check not in ("storage", "datastore") else None
    median = statistics.median(values)
    figures = []
    # If all are too slow, that is no single node's fault
    common = threshold is not None and len(values) > 1 and max(values) < threshold.floor
    if common and threshold is not None:
        floor = f"the floor {threshold.floor:g} {unit} ({threshold.kind})"
        title = f"{what} of all {len(same)} ranks is below {floor}; the fastest reaches {max(values):.4g}."
        code = "peer-copy-slow" if check == "peer-copy" else "below-floor"
        found.append(finding(check, code, "FAIL", title))
    for index, local in enumerate(same):
        value, name = values[index], case.name_of_rank(local.rank)
        held = hold(value, threshold, None if beside is None else (beside[index], median))
        figures.append(held.figure(what, value, unit, node=name, rank=local.rank))
        if held.level in ("WARN", "FAIL") and not common:
            peer = "" if local.peer is None else f" to rank {local.peer}"
            title = f"{what} of rank {local.rank}{peer} ({name}): {value:.4g} {unit}, {held.words}."
            code = "peer-copy-slow" if check == "peer-copy" else held.code
            found.append(finding(check, code, held.level, title, nodes=[name], ranks=[local.rank]))
    least = min(values)
    past = by_past(case.past(what, None, least) if case.cuda else None)
    if past.level is not None:
        figures.append(past.figure(f"{what}, slowest", least, unit))
        blamed = any(figure.verdict in ("WARN", "FAIL") for figure in figures[:-1])
        if past.level != "PASS" and not blamed:
            rank = same[values.index(least)].rank
            title = f"The slowest {what}, {least:.4g} {unit}, is {past.words}."
            name = case.name_of_rank(rank)
            found.append(finding(check, past.code, past.level, title, suspects=[name], ranks=[rank]))
    return figures
