"""Earlier runs of a flow from Metaflow's client, newest first, of all users, within a time limit."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any

from metaflow import Flow, Run, get_namespace, namespace
from metaflow.exception import MetaflowException, MetaflowNotFound

from estimator.errors import UserError

_SEARCHED_RUNS = 200  # newest runs of a flow among which an id is looked up by its last characters
ADVICE = "Run this in the folder where the runs were started, or with the same Metaflow configuration."


class NeverRunError(Exception):
    """Metaflow has no run of the flow."""


def runs_of(flow: str, *, limit: int | None = None) -> Iterator[Any]:
    """Yield a flow's runs in the current namespace, newest first, at most ``limit``.

    Raises NeverRunError.
    """
    try:
        runs = iter(Flow(flow).runs())
    except MetaflowNotFound:
        raise NeverRunError(f"Metaflow finds no flow {flow}.") from None
    return islice(runs, limit)


def find_run(flows: Sequence[str], run_id: str) -> Run:
    """Return the run of these flows with this id, or the only recent one whose id ends with it.

    Looks in the current namespace. Raises UserError if there is none, or more than one.
    """
    for flow in flows:
        with suppress(MetaflowException):
            return Run(f"{flow}/{run_id}")
    recent: list[Run] = []
    for flow in flows:
        with suppress(NeverRunError):
            recent += runs_of(flow, limit=_SEARCHED_RUNS)
    matching = [run for run in recent if str(run.id).endswith(run_id)]
    if len(matching) == 1:
        return matching[0]
    if matching:
        raise UserError(
            f"{len(matching)} runs of {' or '.join(flows)} end with {run_id}.", "Give more digits of the id."
        )
    raise UserError(f"There is no run {run_id} of {' or '.join(flows)}.", ADVICE)


def ended_tasks(runs: Iterable[Any], step: str, artifacts: Iterable[str]) -> Iterator[Any]:
    """Yield the step's task of each run in which the step ended and stored all these artifacts."""
    names = set(artifacts)
    for run in runs:
        try:
            task = run[step].task
        except KeyError:  # the run ended before that step
            continue
        if task is not None and task.finished and names <= {artifact.id for artifact in task}:
            yield task


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """One attempt of a task, from the start of its process."""

    seconds: float | None  # None: end unknown
    succeeded: bool


def attempts_of(task: Any) -> list[Attempt]:
    """Return a task's attempts in order, from Metaflow's metadata; empty for a task cloned by ``resume``.

    A killed attempt has no recorded end: it is assumed to have lasted until the next one started; for the
    last attempt the end is unknown.
    """
    noted = sorted(task.metadata, key=lambda item: int(item.created_at))
    if any(item.name == "origin-task-id" for item in noted):
        return []
    begins = [int(item.created_at) for item in noted if item.name == "attempt"]
    ends = [(int(item.created_at), item.value == "True") for item in noted if item.name == "attempt_ok"]
    attempts = []
    for number, started in enumerate(begins):
        following = begins[number + 1] if number + 1 < len(begins) else None
        ends_of_attempt = [
            end for end in ends if started <= end[0] and (following is None or end[0] < following)
        ]
        until = ends_of_attempt[0][0] if ends_of_attempt else following
        seconds = None if until is None else (until - started) / 1000
        attempts.append(Attempt(seconds=seconds, succeeded=bool(ends_of_attempt) and ends_of_attempt[0][1]))
    return attempts


def read_for(limit_s: float, read: Callable[[threading.Event], None]) -> bool:
    """Call ``read`` with all users' runs visible; return whether it finished within the time limit.

    ``read`` runs in a separate thread and must stop when its event is set, after the limit. It stores its
    results itself; its exceptions are dropped.
    """
    stop = threading.Event()
    reader = threading.Thread(target=read, args=(stop,), name="past-runs", daemon=True)
    previous = get_namespace()
    namespace(None)  # scheduled runs are in the namespace of their deployment
    try:
        reader.start()
        reader.join(limit_s)
    finally:
        stop.set()
        namespace(previous)
    return not reader.is_alive()
