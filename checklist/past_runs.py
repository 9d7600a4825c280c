"""What earlier runs leave to a later one: figures to be compared with, and failures that are still open.

:func:`fold` makes that from runs, wherever they are kept. Here they are kept in a file to which each run
adds a line, or in a folder of results; a flow's runs keep them as artifacts.
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
from checklist.analysis.recurrence import Look
from checklist.checks import Profile
from checklist.judges.loss import look_of
from checklist.measurements import STRICT, record
from checklist.open_failures import still_open
from checklist.result import CheckResult, Result, Standing, Verdict
from estimator import json_lines
from estimator.errors import UserError

SCHEMA_VERSION = 1
RUNS_OF_PAIRS = 100  # the newest, that tell when a pair of nodes was measured last
MOST_RUNS = 1000  # the newest, that are looked back on; each run's failures are carried on by the next
_BEGINNING = '{"version"'  # of a line that some version of this program has written


@dataclass(frozen=True, kw_only=True, slots=True)
class PastRun:
    """What later runs need of a finished one: its checks, its open failures and its figures."""

    __pydantic_config__ = STRICT
    version: int = SCHEMA_VERSION
    finished_unix: float
    started_unix: float | None = None
    """None: by a version that didn't tell."""
    verdict: Verdict
    profile: Profile
    checks: tuple[CheckResult, ...]
    """Without their figures."""
    standing: tuple[Standing, ...]
    """Failures of runs before it that it has not cleared."""
    failures: tuple[Standing, ...]
    """Its own."""
    records: tuple[Record, ...]
    look: Look | None = None
    """What it has seen of what comes and goes; None: it has not looked."""
    gpus: dict[str, tuple[str, ...]] = field(default_factory=dict, hash=False)
    """By node, the UUIDs of the GPUs that it has used."""


@dataclass(frozen=True, kw_only=True, slots=True)
class History:
    """What :func:`checklist.verdict.judge` takes of the past, and what of it can't be used."""

    records: tuple[Record, ...] = ()
    open_failures: tuple[Standing, ...] = ()
    looks: tuple[Look, ...] = ()
    pairs_seen: dict[tuple[str, str], float] = field(default_factory=dict)
    """When a pair of nodes was measured last, of the newest ``RUNS_OF_PAIRS`` runs, Unix time."""
    problems: tuple[str, ...] = ()
    """A line for each kind of earlier run that can't be read: its failures may be open, unknown to us."""


def run_of(result: Result) -> PastRun:
    """Reduce a result to what later runs are judged by."""
    return PastRun(
        finished_unix=result.finished_unix,
        started_unix=result.measurements.started_unix,
        verdict=result.verdict,
        profile=result.profile,
        checks=tuple(dataclasses.replace(check, figures=()) for check in result.checks),
        standing=result.standing,
        failures=result.open_failures()[len(result.standing) :],
        records=result.records,
        look=look_of(result),
        gpus=result.gpus,
    )


def fold(runs: Iterable[PastRun], problems: Iterable[str] = ()) -> History:
    """Go through the runs in the order of their ends: each clears and adds failures.

    What was found while a run went on isn't cleared by it, so two runs at a time lose none. A failure that
    was found again and again is one, since its first time.
    """
    ordered = sorted(dict.fromkeys(runs), key=lambda run: run.finished_unix)[-MOST_RUNS:]
    standing = ordered[0].standing if ordered else ()
    for run in ordered:
        began = run.finished_unix if run.started_unix is None else run.started_unix
        kept = still_open(standing, run.checks, run.profile, run.gpus, began)
        standing = _with_new(kept, run.failures)
    records = tuple(item for run in ordered for item in run.records)
    looks = tuple(run.look for run in ordered if run.look is not None)
    return History(
        records=records,
        open_failures=standing,
        looks=looks,
        pairs_seen=_pairs_seen(ordered[-RUNS_OF_PAIRS:]),
        problems=tuple(problems),
    )


def _with_new(known: Iterable[Standing], failures: Iterable[Standing]) -> tuple[Standing, ...]:
    """Open failures and a run's own; one that is there already stays from its first time, with new pairs."""
    by_key = {_key(item): item for item in known}
    for item in failures:
        old = by_key.setdefault(_key(item), item)
        links = tuple(dict.fromkeys((*old.links, *item.links)))
        seen = max(old.seen_unix, item.seen_unix)
        by_key[_key(item)] = dataclasses.replace(old, links=links, seen_unix=seen)
    return tuple(by_key.values())


def _key(item: Standing) -> tuple[object, ...]:
    return item.check, item.profile, item.nodes, item.over_nodes, item.blamed, item.gpus


def _pairs_seen(runs: Iterable[PastRun]) -> dict[tuple[str, str], float]:
    """When each pair was measured last; all pairs of small runs."""
    seen: dict[tuple[str, str], float] = {}
    for run in runs:
        for check in run.checks:
            if check.check == "pairs" and check.coverage is not None:
                nodes = check.nodes
                places = combinations(range(len(nodes)), 2) if check.links is None else check.links
                seen |= {_ordered(nodes[a], nodes[b]): run.finished_unix for a, b in places}
    return seen


def _ordered(a: str, b: str) -> tuple[str, str]:
    return (a, b) if a < b else (b, a)


# ---- kept in files


def check_place(place: Path) -> None:
    """Whether a history can be kept there: in a folder that there is, else in a file. Raises UserError."""
    if place.is_dir():
        writable = os.access(place, os.W_OK | os.X_OK)
    else:
        writable = os.access(place if place.exists() else place.absolute().parent, os.W_OK)
    if not writable:
        raise UserError(
            f"--history {place} can't be written.", "Name a folder that there is, or a file in one."
        )
    if place.is_dir():
        return
    lines = _lines(place)
    if lines and not any(line.startswith(_BEGINNING) for line in lines):
        raise UserError(
            f"--history {place} is no history of the checklist: nothing is added to it.",
            "Name a file that such a run has begun, one that is not there yet, or a folder of results.",
        )


def read(place: Path) -> History:
    """Earlier runs; a line for each reason why some can't be read. Raises UserError where nothing can be."""
    runs: list[PastRun] = []
    wrong: Counter[str] = Counter()
    for text in _texts(place):
        try:
            runs.append(run_of(results.from_json(text)) if place.is_dir() else from_json(text))
        except UserError as error:  # noqa: PERF203 - each run has its own
            wrong[error.problem] += 1
    return fold(runs, (_told(place, problem, count) for problem, count in wrong.items()))


def keep(result: Result, place: Path) -> None:
    """Add a run, whole or not at all. Raises UserError where that fails."""
    if place.is_dir():
        ended = datetime.datetime.fromtimestamp(result.finished_unix, datetime.timezone.utc)
        results.write(result, place / f"checklist-{ended:%Y%m%dT%H%M%SZ}-{secrets.token_hex(3)}.json")
        return
    try:
        json_lines.append(place, json.dumps(dataclasses.asdict(run_of(result)), allow_nan=False))
    except OSError as error:
        raise _file_error(place, "This run can't be added to", error) from None


def _texts(place: Path) -> list[str]:
    """Each run's text: the folder's newest JSON files, or the file's lines."""
    try:
        if not place.is_dir():
            return _lines(place)[-MOST_RUNS:]
        files = sorted(place.glob("*.json"), key=lambda file: file.stat().st_mtime)
        return [file.read_text(errors="replace") for file in files[-MOST_RUNS:]]
    except OSError as error:
        raise _file_error(place, "Earlier runs can't be read from", error) from None


def _lines(file: Path) -> list[str]:
    try:
        return [line for line in json_lines.read(file) if line.strip()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise _file_error(file, "Earlier runs can't be read from", error) from None


def from_json(text: str) -> PastRun:
    """What a run has kept. Raises UserError where it is of another schema version, or broken."""
    try:
        values = json.loads(text)
    except ValueError:
        raise UserError("It is not JSON: its writer was killed, or somebody has edited it.") from None
    version = values.get("version") if isinstance(values, dict) else None
    if version != SCHEMA_VERSION:
        raise UserError(f"It has schema version {version!r}; this program reads {SCHEMA_VERSION}.")
    return record(PastRun, values)


def _told(place: Path, problem: str, count: int) -> str:
    what = "1 earlier run" if count == 1 else f"{count} earlier runs"
    return f"{what} of {place} can't be used, and a failure in there may still be open. {problem}"


def _file_error(place: Path, what: str, error: OSError) -> UserError:
    return UserError(
        f"{what} {place}: {error.strerror or error}.", "Name a file that may be read and written."
    )
