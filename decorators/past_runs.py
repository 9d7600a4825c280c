"""Earlier runs of a flow, read through Metaflow's client within a time limit: newest first, of all users."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from metaflow import Flow, get_namespace, namespace
from metaflow.exception import MetaflowNotFound


class NeverRunError(Exception):
    """Metaflow knows no run of that flow."""


def runs_of(flow: str, *, most: int | None = None) -> Iterator[Any]:
    """Yield a flow's runs in the current namespace, newest first, at most ``most``.

    Raises NeverRunError.
    """
    try:
        runs = iter(Flow(flow).runs())
    except MetaflowNotFound:
        raise NeverRunError(f"There is no flow {flow} where Metaflow looks.") from None
    return islice(runs, most)


def ended_tasks(runs: Iterable[Any], step: str, artifacts: Iterable[str]) -> Iterator[Any]:
    """Yield the task of a step of each run in which the step ended and left all these artifacts."""
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

    seconds: float | None  # None: no one knows when it ended
    succeeded: bool


def attempts_of(task: Any) -> list[Attempt]:
    """Return a task's attempts in order, from Metaflow's metadata; empty if a resumed run took the task over.

    An attempt that was killed has left no end: it is taken to have lasted until the next one began, and
    nothing is known of the last.
    """
    noted = sorted(task.metadata, key=lambda item: int(item.created_at))
    if any(item.name == "origin-task-id" for item in noted):
        return []
    begins = [int(item.created_at) for item in noted if item.name == "attempt"]
    ends = [(int(item.created_at), item.value == "True") for item in noted if item.name == "attempt_ok"]
    found = []
    for number, begin in enumerate(begins):
        following = begins[number + 1] if number + 1 < len(begins) else None
        own = [end for end in ends if begin <= end[0] and (following is None or end[0] < following)]
        until = own[0][0] if own else following
        seconds = None if until is None else (until - begin) / 1000
        found.append(Attempt(seconds=seconds, succeeded=bool(own) and own[0][1]))
    return found


def read_for(limit_s: float, read: Callable[[threading.Event], None]) -> bool:
    """Call ``read`` with all users' runs visible; return whether it finished within that time.

    It reads in a thread of its own, and is to stop once the event that it is given is set, which says that
    no one waits any longer. What it finds it leaves somewhere; what it raises is lost.
    """
    over = threading.Event()
    reader = threading.Thread(target=read, args=(over,), name="past-runs", daemon=True)
    before = get_namespace()
    namespace(None)  # a nightly run's namespace is its deployment's
    try:
        reader.start()
        reader.join(limit_s)
    finally:
        over.set()
        namespace(before)
    return not reader.is_alive()
