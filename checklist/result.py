"""Result of one run: verdicts, findings with advice, and all measurements. Versioned JSON.

``python -m checklist.result`` renews ``result.schema.json``, which ships with the package.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from checklist import json_text
from checklist.analysis.baseline import Record
from checklist.analysis.diagnosis import Diagnosis
from checklist.measurements import STRICT, Measurements, record
from checklist.registry import Profile
from estimator.errors import UserError
from estimator.untrusted import parse_json

SCHEMA_VERSION = 2
SCHEMA_FILE = Path(__file__).with_name("result.schema.json")
Verdict = Literal["PASS", "WARN", "FAIL", "NO-VERDICT"]
Gravity = Literal["WARN", "FAIL"]  # of a finding
MAX_LINKS = 64  # per failure; more than this concern the cluster as a whole
EXIT_CODES: dict[Verdict, int] = {"PASS": 0, "WARN": 0, "FAIL": 1, "NO-VERDICT": 3}


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One fault: its location, evidence and remedy."""

    __pydantic_config__ = STRICT
    check: str
    code: str
    """Key of an advice.yaml in checklist/checks/ or checklist/judging/."""
    verdict: Gravity
    title: str
    """One line: the fault, its location and figures."""
    nodes: tuple[str, ...] = ()
    """Nodes at fault. A slow link's ends are not."""
    suspects: tuple[str, ...] = ()
    """Nodes of which at least one may be at fault, if the faulty one is undecided."""
    ranks: tuple[int, ...] = ()
    links: tuple[tuple[str, str], ...] = ()
    """Affected pairs of nodes, if the fault lies between nodes."""
    gpus: tuple[str, ...] = ()
    """UUIDs of the affected GPUs, if the fault concerns single ones."""
    advice: tuple[str, ...] = ()
    """Remedy, one or two lines."""
    command: str | None = None
    """Command to copy; None if there is none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """One figure, with its reference if there is one."""

    __pydantic_config__ = STRICT
    name: str
    value: float
    unit: str
    verdict: Verdict
    bytes: int | None = None
    node: str | None = None
    rank: int | None = None
    expected: float | None = None
    """Reference of the comparison: the floor, the usual value of healthy clusters, the median of the peers or
    of earlier runs."""
    basis: Literal["floor", "expectation", "peers", "history", "none"] = "none"
    source: str | None = None
    """Source of the floor, or the arithmetic of the expectation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Coverage:
    """Measured part of a check's subjects."""

    __pydantic_config__ = STRICT
    what: Literal["GPUs", "ranks", "nodes", "pairs"]
    measured: int
    of: int
    earlier: int = 0
    """Number of the other subjects that earlier runs measured."""
    oldest_days: float | None = None
    """Age in days of the oldest of these measurements."""

    @property
    def description(self) -> str:
        """Description such as "240 of 4,950 pairs; 1,200 of the others up to 3 days ago, the rest never."."""
        text = f"{self.measured:,} of {self.of:,} {self.what}"
        never = self.of - self.measured - self.earlier
        if self.oldest_days is not None:
            remainder = ", the rest never" if never else ""
            text += f"; {self.earlier:,} of the others up to {self.oldest_days:.0f} days ago{remainder}"
        return f"{text}."


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckResult:
    """Result of one check."""

    __pydantic_config__ = STRICT
    check: str
    verdict: Verdict
    reason: str
    """Reason for the verdict, one line."""
    measured: bool
    """False: NO-VERDICT because nothing was measured; true with NO-VERDICT: nothing to compare with."""
    nodes: tuple[str, ...] = ()
    """Nodes on which all ranks were measured."""
    coverage: Coverage | None = None
    links: tuple[tuple[int, int], ...] | None = None
    """Pairs measured in both directions, as indexes into ``nodes``; None: all pairs of these nodes."""
    doubted: tuple[str, ...] | None = None
    """Nodes named by its findings; all nodes if a finding names none; None in results of older versions."""
    figures: tuple[Figure, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Skipped:
    """A check that was not selected, or does not apply to this run."""

    __pydantic_config__ = STRICT
    check: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenFailure:
    """An earlier FAIL that no later run has cleared."""

    __pydantic_config__ = STRICT
    check: str
    profile: Profile
    """Profile of the run that found it; only a check of at least this depth clears it."""
    since_unix: float
    seen_unix: float = 0.0
    """Time of the last run that found it."""
    title: str
    nodes: tuple[str, ...] = ()
    """Nodes that a clearing check must cover; empty: the cluster as a whole."""
    over_nodes: int = 0
    """Minimum number of nodes that a clearing check must cover, whichever they are."""
    blamed: bool = False
    """Whether these nodes are at fault and therefore count as bad."""
    links: tuple[tuple[str, str], ...] = ()
    """Pairs that a clearing check must have measured as well."""
    gpus: tuple[str, ...] = ()
    """UUIDs of GPUs that a clearing check must have measured, or found replaced."""
    over_gpus: int = 0
    """Minimum number of GPUs of the node that a clearing check must cover."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FitResult:
    """Latency (alpha) and bandwidth (beta) of one operation (analysis/busbw.py)."""

    __pydantic_config__ = STRICT
    op: str
    dtype: str
    alpha_s: float | None
    beta_gbytes_per_s: float | None
    half_bytes: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """Complete result of one run."""

    __pydantic_config__ = STRICT
    version: int = SCHEMA_VERSION
    verdict: Verdict
    headline: str
    """Summary, one line."""
    finished_unix: float
    profile: Profile
    nodes: tuple[str, ...]
    """All nodes of the run, in the order of the ranks."""
    healthy_nodes: tuple[str, ...]
    bad_nodes: tuple[str, ...]
    """Nodes named by a FAIL of this run, or by an earlier open one."""
    checks: tuple[CheckResult, ...]
    skipped: tuple[Skipped, ...]
    findings: tuple[Finding, ...]
    standing: tuple[OpenFailure, ...] = ()
    """Earlier failures that this run has not cleared."""
    diagnosis: Diagnosis | None = None
    fits: tuple[FitResult, ...] = ()
    busbw_gbytes_per_s: float | None = None
    """busbw of all_reduce at the largest size over all nodes, for estimates; None: not measured over a
    network.
    """
    records: tuple[Record, ...] = ()
    """Figures for the history of later runs."""
    notes: tuple[str, ...] = ()
    suspects_measured: tuple[str, ...] = ()
    """Nodes listed as suspects that this run has measured."""
    next_commands: tuple[str, ...] = ()
    """Commands for checks that a run on one machine cannot make."""
    measurements: Measurements
    """Condensed for large runs (checklist/condensed.py); ``notes`` list the omitted data."""

    @property
    def exit_code(self) -> int:
        """Exit status: 0 pass or warn, 1 fail, 3 no verdict."""
        return EXIT_CODES[self.verdict]

    def check(self, name: str) -> CheckResult | None:
        """Return the result of a check; None if it was not selected."""
        return next((check for check in self.checks if check.check == name), None)

    def open_failures(self) -> tuple[OpenFailure, ...]:
        """Failures that a later run has to clear: this run's and the earlier open ones."""
        failures: list[OpenFailure] = []
        by_node = self.gpus if any(finding.gpus for finding in self.findings) else {}
        for finding in self.findings:
            if finding.verdict != "FAIL":
                continue
            common: dict[str, Any] = {
                "check": finding.check,
                "profile": self.profile,
                "since_unix": self.finished_unix,
                "seen_unix": self.finished_unix,
                "title": finding.title,
            }
            # Each node by itself, so that one can be cleared without the other
            for node in finding.nodes:
                uuids = tuple(uuid for uuid in finding.gpus if uuid in by_node.get(node, ()))
                gpu_count = len(by_node[node]) if uuids else 0
                failures.append(
                    OpenFailure(**common, nodes=(node,), blamed=True, gpus=uuids, over_gpus=gpu_count)
                )
            if not finding.nodes:
                is_few = len(finding.links) <= MAX_LINKS
                gpu_count = 0 if finding.suspects and is_few else len(self.nodes)
                links = finding.links if is_few else ()
                failures.append(
                    OpenFailure(**common, nodes=finding.suspects, over_nodes=gpu_count, links=links)
                )
        return (*self.standing, *failures)

    @property
    def gpus(self) -> dict[str, tuple[str, ...]]:
        """UUIDs of the GPUs used by this run's ranks, by node."""
        names = dict(zip(self.measurements.nodes, self.nodes, strict=True))
        by_node: dict[str, tuple[str, ...]] = {}
        for fact in self.measurements.facts:
            uuids = fact.gpu_uuids[fact.local_rank :][:1]
            by_node[names[fact.node]] = (*by_node.get(names[fact.node], ()), *uuids)
        return by_node


def to_json(result: Result) -> str:
    """Convert to JSON text with a final newline; see :mod:`checklist.json_text`."""
    return json_text.text(result)


def from_json(text: str) -> Result:
    """Parse JSON text. Raises UserError if it is invalid or of another schema version."""
    try:
        values = parse_json(text)
    except ValueError as error:
        raise UserError(f"The result is not JSON: {error}.", "Run the checks again.") from None
    version = values.get("version") if isinstance(values, dict) else None
    if version != SCHEMA_VERSION:
        raise UserError(
            f"The result has schema version {version!r}; this program reads {SCHEMA_VERSION}.",
            "Run the checks again, or read it with the program that wrote it.",
        )
    return record(Result, values)


def read(file: Path) -> Result:
    """Read a result file. Raises UserError."""
    try:
        return from_json(file.read_text())
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise UserError(f"The result {file} cannot be read: {reason}.", "Name a result.json.") from None


def write(result: Result, file: Path) -> None:
    """Write the file atomically. Raises UserError if the file cannot be written."""
    part = file.with_name(f".{file.name}.part")
    try:
        part.write_text(to_json(result))
        part.replace(file)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise UserError(
            f"The result cannot be written to {file}: {error.strerror or error}.", "Name another file."
        ) from None


def schema() -> dict[str, Any]:
    """Return the JSON Schema of result.json, derived from the classes."""
    from pydantic import TypeAdapter  # heavy to import

    described = TypeAdapter(Result).json_schema(mode="validation")  # what is the default may be left out
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **described}


def schema_text() -> str:
    return json.dumps(schema(), indent=1) + "\n"


if __name__ == "__main__":
    SCHEMA_FILE.write_text(schema_text())
