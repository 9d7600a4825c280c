"""Suspected nodes that slowed down a training run, for the next checklist to measure first.

One file per rank in the datastore shared by all flows, under the cluster's name, so that a killed run leaves
its suspicions, too. A checklist of the cluster removes the suspicion after it has measured the node.
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
from estimator.terminal import print
from launchers.report.stragglers import describe
from launchers.report.telemetry import Straggling
from launchers.store.bundles import Storage

MAX_SUSPICIONS = 256  # maximum number of files read


@dataclass(frozen=True, kw_only=True, slots=True)
class Suspicion:
    """One rank that the other ranks of a training run had to wait for."""

    node: str  # its name in the checklist
    run: str  # the training run
    words: str
    at: float  # Unix time
    key: str = ""  # key in the datastore, set when read


def record(event: Straggling, *, cluster: str, run: str, on_gpus: bool, store: Storage | None = None) -> None:
    """Store a suspicion for the next checklist. Never raises, because training must continue."""
    if event.over:
        return
    suspicion = Suspicion(node=event.host, run=run, words=describe(event, on_gpus=on_gpus), at=event.at)
    key = f"{_folder(cluster)}/{run}-{event.rank:05d}.json"
    try:
        (store or datastore(shared=True)).put_bytes(key, json.dumps(dataclasses.asdict(suspicion)).encode())
    except Exception as error:  # noqa: BLE001 - whatever a datastore may answer with
        print(
            f"The suspicion could not be stored for the next checklist: {type(error).__name__}: {error}",
            file=sys.stderr,
        )


def read(cluster: str, store: Storage | None = None) -> tuple[Suspicion, ...]:
    """Read the suspicions of runs on this cluster, oldest first. Unreadable ones are reported in a line."""
    suspicions = []
    try:
        store = store or datastore(shared=True)
        for key in store.keys(_folder(cluster))[:MAX_SUSPICIONS]:
            values = json.loads(store.get_bytes(key))
            suspicions.append(Suspicion(**{**values, "key": key}))
    except Exception as error:  # noqa: BLE001 - a checklist is made without them
        print(f"Suspicions of earlier training runs cannot be read: {type(error).__name__}: {error}")
    return tuple(sorted(suspicions, key=lambda each: each.at))


def notes(suspicions: Iterable[Suspicion]) -> tuple[str, ...]:
    """Return one line per suspicion for the checklist's result."""
    return tuple(f"Training run {suspicion.run} reported: {suspicion.words}." for suspicion in suspicions)


def remove_measured(suspicions: Iterable[Suspicion], result: Result, store: Storage | None = None) -> None:
    """Remove the suspicions of nodes that this checklist has measured; its findings replace them."""
    measured_nodes = set(result.suspects_measured)
    keys = [suspicion.key for suspicion in suspicions if suspicion.node in measured_nodes]
    if keys:
        try:
            (store or datastore(shared=True)).delete(keys)
        except Exception as error:  # noqa: BLE001 - the next checklist measures them again
            print(f"Checked suspicions could not be removed: {type(error).__name__}: {error}")


def _folder(cluster: str) -> str:
    return f"suspicions/{quote(cluster, safe='')}"
