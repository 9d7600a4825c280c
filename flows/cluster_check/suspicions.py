"""Nodes that held up a training: left by the run while it goes on, looked at first by the next checklist.

One file for each rank in the datastore that all flows share, under the cluster's name, so that a run that is
killed leaves its own too. A checklist of that cluster that has measured the node takes it away.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import quote

from checklist.result import Result
from decorators.storage import datastore
from launchers.report.stragglers import describe
from launchers.report.telemetry import Straggling
from launchers.store.bundles import Storage

MAX_SUSPICIONS = 256  # that are read


@dataclass(frozen=True, kw_only=True, slots=True)
class Suspicion:
    """One rank for which the others of a training have waited."""

    node: str  # as the checklist calls it
    run: str  # of the training
    words: str
    at: float  # Unix time
    key: str = ""  # where it lies; as read


def leave(event: Straggling, *, cluster: str, run: str, on_gpus: bool, store: Storage | None = None) -> None:
    """Keep it for the next checklist. Never raises: a training doesn't end for that."""
    if event.over:
        return
    one = Suspicion(node=event.host, run=run, words=describe(event, on_gpus=on_gpus), at=event.at)
    key = f"{_folder(cluster)}/{run}-{event.rank:05d}.json"
    try:
        (store or datastore(shared=True)).put_bytes(key, json.dumps(dataclasses.asdict(one)).encode())
    except Exception as error:  # noqa: BLE001 - whatever a datastore may answer with
        print(f"The next checklist will not hear of it: {type(error).__name__}: {error}", file=sys.stderr)


def read(cluster: str, store: Storage | None = None) -> tuple[Suspicion, ...]:
    """Read the suspicions of runs on this cluster, oldest first. Unreadable ones are reported in a line."""
    found = []
    try:
        store = store or datastore(shared=True)
        for key in store.keys(_folder(cluster))[:MAX_SUSPICIONS]:
            values = json.loads(store.get_bytes(key))
            found.append(Suspicion(**{**values, "key": key}))
    except Exception as error:  # noqa: BLE001 - a checklist is made without them
        print(f"Suspicions of earlier trainings can't be read: {type(error).__name__}: {error}")
    return tuple(sorted(found, key=lambda each: each.at))


def notes(suspicions: Iterable[Suspicion]) -> tuple[str, ...]:
    """A line of the checklist's result for each."""
    return tuple(f"Training {each.run} said: {each.words}." for each in suspicions)


def settle(suspicions: Iterable[Suspicion], result: Result, store: Storage | None = None) -> None:
    """Take away those of nodes that this checklist has measured; what it found is its own to keep open."""
    measured = set(result.suspects_measured)
    keys = [each.key for each in suspicions if each.node in measured]
    if keys:
        try:
            (store or datastore(shared=True)).delete(keys)
        except Exception as error:  # noqa: BLE001 - they are looked at once more
            print(f"Suspicions that are settled can't be removed: {type(error).__name__}: {error}")


def _folder(cluster: str) -> str:
    return f"suspicions/{quote(cluster, safe='')}"
