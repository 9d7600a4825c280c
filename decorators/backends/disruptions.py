"""Pods and machines that a cluster takes away, noted in the run's store, and how a step's gang has ended.

In the store::

    disruptions/RUN/STEP/NUMBER.json      what was taken away, and when
    last-words/RUN/STEP.LAUNCH.json       how a gang has ended, from a node that outlived the lost one

A disruption is no attempt of a step (decorators.backends.resubmitting). A step's launches are counted over
attempts and disruptions (:meth:`Disruptions.launch`), so that each has checkpoints and logs of its own.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass

from decorators.backends.interface import LastWords
from decorators.storage import datastore
from launchers.gang.failures import Failure
from launchers.store.bundles import Storage


@dataclass(frozen=True, kw_only=True, slots=True)
class Disruption:
    """Resources that a cluster took away at one time."""

    at: float  # seconds since the epoch
    lost: tuple[str, ...]  # a line for each pod or machine: its name, its node, the cause

    @property
    def text(self) -> str:
        """In a line, with the time of day."""
        clock = time.strftime("%H:%M:%S", time.localtime(self.at))
        more = f", and {len(self.lost) - 4} more" if len(self.lost) > 4 else ""
        return f"{clock} {'; '.join(self.lost[:4])}{more}"


@dataclass(frozen=True, kw_only=True)
class Disruptions:
    """Disruptions of one run."""

    storage: Storage
    run: str

    def note(self, step: str, disruption: Disruption) -> None:
        """Keep one."""
        key = f"{self._prefix}/{step}/{time.time_ns():020d}.json"
        self.storage.put_bytes(key, json.dumps(asdict(disruption)).encode())

    def count(self) -> int:
        """Count the disruptions of the run, in all its steps."""
        return len(self.storage.keys(self._prefix))

    def of_step(self, step: str) -> tuple[Disruption, ...]:
        """A step's, the oldest first."""
        found = []
        for key in sorted(self.storage.keys(f"{self._prefix}/{step}")):
            values = json.loads(self.storage.get_bytes(key))
            found.append(Disruption(at=values["at"], lost=tuple(values["lost"])))
        return tuple(found)

    def launch(self, step: str, attempt: int) -> int:
        """The number of a step's launch: 0 is the first; attempts and disruptions both add to it."""
        return attempt + len(self.storage.keys(f"{self._prefix}/{step}"))

    def leave_words(self, step: str, launch: int, failure: Failure) -> None:
        """By a node whose gang has ended: the cause. All nodes leave the same."""
        words = {"kind": failure.kind, "host": failure.host}
        self.storage.put_bytes(self._words_key(step, launch), json.dumps(words).encode())

    def last_words(self, step: str, launch: int) -> LastWords | None:
        """Return the last message of a node; None if there is none."""
        try:
            return LastWords(**json.loads(self.storage.get_bytes(self._words_key(step, launch))))
        except FileNotFoundError:
            return None

    @property
    def _prefix(self) -> str:
        return f"disruptions/{self.run}"

    def _words_key(self, step: str, launch: int) -> str:
        return f"last-words/{self.run}/{step}.{launch}.json"


def of_run(run: str) -> Disruptions:
    """Return the disruptions of a run of the running flow."""
    return Disruptions(storage=datastore(), run=run)
