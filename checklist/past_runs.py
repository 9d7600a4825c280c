"""History of runs: figures for comparison and failures that are still open.

:func:`fold` derives it from runs of any storage. This module stores runs in a file with one line per run, or
reads a folder of results; flows store them as artifacts.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import secrets
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path

from checklist import result as results
from checklist.analysis.baseline import Record
from checklist.analysis.recurrence import Sightings
from checklist.checks.network.loss_judge import sightings_of
from checklist.measurements import STRICT, record
from checklist.open_failures import still_open
from checklist.registry import Profile
from checklist.result import CheckResult, OpenFailure, Result, Verdict
from estimator import json_lines
from estimator.errors import UserError
from estimator.untrusted import parse_json

SCHEMA_VERSION = 1
RUNS_OF_PAIRS = 100  # number of newest runs searched for the last measurement of a pair
MAX_RUNS = 1000  # number of newest runs read; each run carries forward open failures of earlier ones
_BEGINNING = '{"version"'  # prefix of lines written by any version of this program


@dataclass(frozen=True, kw_only=True, slots=True)
class PastRun:
    """Data of a finished run for later ones: checks, open failures and figures."""

    __pydantic_config__ = STRICT
    version: int = SCHEMA_VERSION
    finished_unix: float
    started_unix: float | None = None
    """None if written by a version without this field."""
    verdict: Verdict
    profile: Profile
    checks: tuple[CheckResult, ...]
    """Results of the checks, without figures."""
    standing: tuple[OpenFailure, ...]
    """Failures of earlier runs that this run has not cleared."""
    failures: tuple[OpenFailure, ...]
    """Failures of this run."""
    records: tuple[Record, ...]
    look: Sightings | None = None
    """Intermittent faults it observed; None if it did not check for them."""
    gpus: dict[str, tuple[str, ...]] = field(default_factory=dict, hash=False)
    """UUIDs of the GPUs it used, by node."""


@dataclass(frozen=True, kw_only=True, slots=True)
class History:
    """History as input of :func:`checklist.verdict.judge`, plus the reasons for unusable parts."""

    records: tuple[Record, ...] = ()
    open_failures: tuple[OpenFailure, ...] = ()
    sightings: tuple[Sightings, ...] = ()
    pairs_seen: dict[tuple[str, str], float] = field(default_factory=dict)
    """Time of the last measurement of each pair within the newest ``RUNS_OF_PAIRS`` runs, Unix time."""
    problems: tuple[str, ...] = ()
    """Line for each kind of unreadable earlier run, whose failures may still be open."""


def run_of(result: Result) -> PastRun:
    """Reduce a result to the data needed for judging later runs."""
    return PastRun(
        finished_unix=result.finished_unix,
        started_unix=result.measurements.started_unix,
        verdict=result.verdict,
        profile=result.profile,
        checks=tuple(dataclasses.replace(check, figures=()) for check in result.checks),
        standing=result.standing,
        failures=result.open_failures()[len(result.standing) :],
        records=result.records,
        look=sightings_of(result),
        gpus=result.gpus,
    )


def fold(runs: Iterable[PastRun], problems: Iterable[str] = ()) -> History:
    """Process the runs in order of their ends; each clears and adds failures.

    A run never clears a failure found while it was running, so concurrent runs lose none. A failure found
    repeatedly counts once, since its first occurrence.
    """
    ordered = sorted(dict.fromkeys(runs), key=lambda run: run.finished_unix)[-MAX_RUNS:]
    standing = ordered[0].standing if ordered else ()
    for run in ordered:
        started = run.finished_unix if run.started_unix is None else run.started_unix
        open_items = still_open(standing, run.checks, run.profile, run.gpus, started)
        standing = _merge(open_items, run.failures)
    records = tuple(item for run in ordered for item in run.records)
    sightings = tuple(run.look for run in ordered if run.look is not None)
    return History(
        records=records,
        open_failures=standing,
        sightings=sightings,
        pairs_seen=_pairs_seen(ordered[-RUNS_OF_PAIRS:]),
        problems=tuple(problems),
    )


def _merge(existing: Iterable[OpenFailure], failures: Iterable[OpenFailure]) -> tuple[OpenFailure, ...]:
    """Merge open failures with a run's own; a known one keeps its first time and gains new pairs."""
    by_key = {_key(item): item for item in existing}
    for item in failures:
        old = by_key.setdefault(_key(item), item)
        links = tuple(dict.fromkeys((*old.links, *item.links)))
        seen_unix = max(old.seen_unix, item.seen_unix)
        by_key[_key(item)] = dataclasses.replace(old, links=links, seen_unix=seen_unix)
    return tuple(by_key.values())


def _key(item: OpenFailure) -> tuple[object, ...]:
    return item.check, item.profile, item.nodes, item.over_nodes, item.blamed, item.gpus


def _pairs_seen(runs: Iterable[PastRun]) -> dict[tuple[str, str], float]:
    """Return the time of each pair's last measurement; all pairs for small runs."""
    last_seen: dict[tuple[str, str], float] = {}
    for run in runs:
        for check in run.checks:
            if check.check == "pairs" and check.coverage is not None:
                nodes = check.nodes
                indexes = combinations(range(len(nodes)), 2) if check.links is None else check.links
                last_seen |= {
                    (min(nodes[a], nodes[b]), max(nodes[a], nodes[b])): run.finished_unix for a, b in indexes
                }
    return last_seen


# ---- storage in files


def check_writable(path: Path) -> None:
    """Check that a history can be stored there: an existing folder, else a file. Raises UserError."""
    if path.is_dir():
        writable = os.access(path, os.W_OK | os.X_OK)
    else:
        writable = os.access(path if path.exists() else path.absolute().parent, os.W_OK)
    if not writable:
        raise UserError(f"--history {path} cannot be written.", "Name an existing folder, or a file in one.")
    if path.is_dir():
        return
    lines = _lines(path)
    if lines and not any(line.startswith(_BEGINNING) for line in lines):
        raise UserError(
            f"--history {path} is not a history of the checklist: nothing is added to it.",
            "Name a file started by such a run, a new file, or a folder of results.",
        )


def read(path: Path) -> History:
    """Read earlier runs, and a line for each reason why some are unreadable. Raises UserError if all are."""
    runs: list[PastRun] = []
    problems: Counter[str] = Counter()
    for text in _texts(path):
        try:
            runs.append(run_of(results.from_json(text)) if path.is_dir() else from_json(text))
        except UserError as error:  # noqa: PERF203 - errors are handled per run
            problems[error.problem] += 1
    return fold(runs, (_problem_text(path, problem, count) for problem, count in problems.items()))


def append(result: Result, path: Path) -> None:
    """Append a run atomically. Raises UserError on failure."""
    if path.is_dir():
        finished = datetime.datetime.fromtimestamp(result.finished_unix, datetime.timezone.utc)
        results.write(result, path / f"checklist-{finished:%Y%m%dT%H%M%SZ}-{secrets.token_hex(3)}.json")
        return
    try:
        json_lines.append(path, json.dumps(dataclasses.asdict(run_of(result)), allow_nan=False))
    except OSError as error:
        raise _file_error(path, "This run cannot be added to", error) from None


def _texts(path: Path) -> list[str]:
    """Return the text of each run: the folder's newest JSON files, or the file's lines."""
    try:
        if not path.is_dir():
            return _lines(path)[-MAX_RUNS:]
        files = sorted(path.glob("*.json"), key=lambda file: file.stat().st_mtime)
        return [file.read_text(errors="replace") for file in files[-MAX_RUNS:]]
    except OSError as error:
        raise _file_error(path, "Earlier runs cannot be read from", error) from None


def _lines(file: Path) -> list[str]:
    try:
        return [line for line in json_lines.read(file) if line.strip()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise _file_error(file, "Earlier runs cannot be read from", error) from None


def from_json(text: str) -> PastRun:
    """Parse a stored run. Raises UserError if it is damaged or of another schema version."""
    try:
        values = parse_json(text)
    except ValueError:
        raise UserError("It is not JSON: its writer was killed, or it was edited.") from None
    version = values.get("version") if isinstance(values, dict) else None
    if version != SCHEMA_VERSION:
        raise UserError(f"It has schema version {version!r}; this program reads {SCHEMA_VERSION}.")
    return record(PastRun, values)


def _problem_text(path: Path, problem: str, count: int) -> str:
    subject = "1 earlier run" if count == 1 else f"{count} earlier runs"
    return f"{subject} of {path} cannot be used, and may contain an open failure. {problem}"


def _file_error(path: Path, action: str, error: OSError) -> UserError:
    return UserError(
        f"{action} {path}: {error.strerror or error}.", "Name a file that may be read and written."
    )
