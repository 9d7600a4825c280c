"""The result of one run: verdicts, findings with advice, all that was measured. JSON both ways, versioned.

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
    """One thing that is wrong, whose it is, and what to do about it."""

    __pydantic_config__ = STRICT
    check: str
    code: str
    """Key of an advice.yaml in checklist/checks/ or checklist/judging/."""
    verdict: Gravity
    title: str
    """One line: what is wrong with whom, in figures."""
    nodes: tuple[str, ...] = ()
    """Nodes at fault. A slow link's ends are not."""
    suspects: tuple[str, ...] = ()
    """Nodes of which at least one may be at fault, if the faulty one is undecided."""
    ranks: tuple[int, ...] = ()
    links: tuple[tuple[str, str], ...] = ()
    """Pairs of nodes that it is about, where it is of what lies between them."""
    gpus: tuple[str, ...] = ()
    """UUIDs of the GPUs that it is about, where it is of single ones."""
    advice: tuple[str, ...] = ()
    """What to do, one or two lines."""
    command: str | None = None
    """To copy and paste; None: nothing can be typed against it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """One number that was judged, or would have been."""

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
    """What of a check was measured."""

    __pydantic_config__ = STRICT
    what: Literal["GPUs", "ranks", "nodes", "pairs"]
    measured: int
    of: int
    earlier: int = 0
    """Number of the others that earlier runs measured."""
    oldest_days: float | None = None
    """How long ago that was for the one that was not looked at for the longest time."""

    @property
    def words(self) -> str:
        """As text, such as "240 of 4,950 pairs; 1,200 of the others up to 3 days ago, the rest never."."""
        text = f"{self.measured:,} of {self.of:,} {self.what}"
        never = self.of - self.measured - self.earlier
        if self.oldest_days is not None:
            rest = ", the rest never" if never else ""
            text += f"; {self.earlier:,} of the others up to {self.oldest_days:.0f} days ago{rest}"
        return f"{text}."


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckResult:
    """The answer to one check."""

    __pydantic_config__ = STRICT
    check: str
    verdict: Verdict
    reason: str
    """One line: why."""
    measured: bool
    """False: NO-VERDICT because nothing was measured; true with NO-VERDICT: nothing to compare with."""
    nodes: tuple[str, ...] = ()
    """Nodes that it was measured on, with all their ranks."""
    coverage: Coverage | None = None
    links: tuple[tuple[int, int], ...] | None = None
    """Pairs that were measured both ways, as places in ``nodes``; None: all pairs of those."""
    doubted: tuple[str, ...] | None = None
    """Nodes named by its findings; all nodes if a finding names none; None in results of older versions."""
    figures: tuple[Figure, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Skipped:
    """A check that was not asked for, or that does not apply here."""

    __pydantic_config__ = STRICT
    check: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """An earlier FAIL that no later run has cleared."""

    __pydantic_config__ = STRICT
    check: str
    profile: Profile
    """It was found with; only as hard a check clears it."""
    since_unix: float
    seen_unix: float = 0.0
    """When it was found last."""
    title: str
    nodes: tuple[str, ...] = ()
    """Whom a clearing check must cover; none: the cluster as a whole."""
    over_nodes: int = 0
    """How many nodes a clearing check must cover, whichever they are."""
    blamed: bool = False
    """Whether those nodes are at fault, and so bad ones."""
    links: tuple[tuple[str, str], ...] = ()
    """Pairs that a clearing check must have measured, too."""
    gpus: tuple[str, ...] = ()
    """UUIDs of GPUs that a clearing check must have measured, or must have found replaced."""
    over_gpus: int = 0
    """How many GPUs of that node a clearing check must cover."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FitResult:
    """alpha and beta of one operation (formulas.Fit)."""

    __pydantic_config__ = STRICT
    op: str
    dtype: str
    alpha_s: float | None
    beta_gbytes_per_s: float | None
    half_bytes: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """All that one run says."""

    __pydantic_config__ = STRICT
    version: int = SCHEMA_VERSION
    verdict: Verdict
    headline: str
    """One line for people."""
    finished_unix: float
    profile: Profile
    nodes: tuple[str, ...]
    """All that took part, in the order of the ranks."""
    healthy_nodes: tuple[str, ...]
    bad_nodes: tuple[str, ...]
    """Named by a FAIL of this run, or by an earlier one that still stands."""
    checks: tuple[CheckResult, ...]
    skipped: tuple[Skipped, ...]
    findings: tuple[Finding, ...]
    standing: tuple[Standing, ...] = ()
    """Earlier failures that this run has not cleared."""
    diagnosis: Diagnosis | None = None
    fits: tuple[FitResult, ...] = ()
    busbw_gbytes_per_s: float | None = None
    """all_reduce's at the largest size over all nodes, for estimates; None: not measured over a network."""
    records: tuple[Record, ...] = ()
    """For the history of later runs."""
    notes: tuple[str, ...] = ()
    suspects_measured: tuple[str, ...] = ()
    """Of the nodes that were to be looked at first, those that the run has measured."""
    next_commands: tuple[str, ...] = ()
    """What judges what a run on one machine cannot."""
    measurements: Measurements
    """Condensed for large runs (checklist/condensed.py); ``notes`` list what was left out."""

    @property
    def exit_code(self) -> int:
        """0 pass or warn, 1 fail, 3 no verdict."""
        return EXIT_CODES[self.verdict]

    def check(self, name: str) -> CheckResult | None:
        """The answer to that check; None where it was not asked."""
        return next((check for check in self.checks if check.check == name), None)

    def open_failures(self) -> tuple[Standing, ...]:
        """What a later run has to clear: this run's failures, and the earlier ones that still stand."""
        new: list[Standing] = []
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
                own = tuple(uuid for uuid in finding.gpus if uuid in by_node.get(node, ()))
                over = len(by_node[node]) if own else 0
                new.append(Standing(**common, nodes=(node,), blamed=True, gpus=own, over_gpus=over))
            if not finding.nodes:
                few = len(finding.links) <= MAX_LINKS
                over = 0 if finding.suspects and few else len(self.nodes)
                links = finding.links if few else ()
                new.append(Standing(**common, nodes=finding.suspects, over_nodes=over, links=links))
        return (*self.standing, *new)

    @property
    def gpus(self) -> dict[str, tuple[str, ...]]:
        """By node, the UUIDs of the GPUs that ranks of this run have used."""
        names = dict(zip(self.measurements.nodes, self.nodes, strict=True))
        by_node: dict[str, tuple[str, ...]] = {}
        for fact in self.measurements.facts:
            own = fact.gpu_uuids[fact.local_rank :][:1]
            by_node[names[fact.node]] = (*by_node.get(names[fact.node], ()), *own)
        return by_node


def to_json(result: Result) -> str:
    """As JSON text with a newline at its end; see :mod:`checklist.json_text`."""
    return json_text.text(result)


def from_json(text: str) -> Result:
    """From JSON text. Raises UserError where it is none, or is of another schema version."""
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
    """The result in a file. Raises UserError."""
    try:
        return from_json(file.read_text())
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise UserError(f"The result {file} cannot be read: {reason}.", "Name a result.json.") from None


def write(result: Result, file: Path) -> None:
    """Writes it whole or not at all. Raises UserError where the file cannot be written."""
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
    """The JSON Schema of result.json, made from the classes."""
    from pydantic import TypeAdapter  # heavy to import

    described = TypeAdapter(Result).json_schema(mode="validation")  # what is the default may be left out
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **described}


def schema_text() -> str:
    return json.dumps(schema(), indent=1) + "\n"


if __name__ == "__main__":
    SCHEMA_FILE.write_text(schema_text())
