"""Record of disruptions (pods and machines that a cluster took away) and of gang failures in the run's store.

In the store::

    disruptions/RUN/STEP/NUMBER.json      lost pods or machines, and the time
    gang-ends/RUN/STEP.LAUNCH.json        cause of a gang's end, stored by a surviving node

A disruption does not count as an attempt of a step (decorators.backends.resubmitting). The launch number of a
step counts both (:meth:`Disruptions.launch`), so that each launch has separate checkpoints and logs.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass

from decorators.backends.interface import GangEnd
from decorators.storage import datastore
from launchers.gang.failures import Failure
from launchers.store.bundles import Storage


@dataclass(frozen=True, kw_only=True, slots=True)
class Disruption:
    """Pods or machines that a cluster took away at one time."""

    at: float  # seconds since the epoch
    lost: tuple[str, ...]  # one line per pod or machine: name, node, cause

    @property
    def text(self) -> str:
        """One line with the time of day."""
        clock = time.strftime("%H:%M:%S", time.localtime(self.at))
        more = f", and {len(self.lost) - 4} more" if len(self.lost) > 4 else ""
        return f"{clock} {'; '.join(self.lost[:4])}{more}"


@dataclass(frozen=True, kw_only=True)
class Disruptions:
    """Disruptions of one run."""

    storage: Storage
    run: str

    def note(self, step: str, disruption: Disruption) -> None:
        """Store a disruption of a step."""
        key = f"{self._prefix}/{step}/{time.time_ns():020d}.json"
        self.storage.put_bytes(key, json.dumps(asdict(disruption)).encode())

    def count(self) -> int:
        """Count the disruptions of the run, in all its steps."""
        return len(self.storage.keys(self._prefix))

    def of_step(self, step: str) -> tuple[Disruption, ...]:
        """Return the disruptions of a step, oldest first."""
        disruptions = []
        for key in sorted(self.storage.keys(f"{self._prefix}/{step}")):
            values = json.loads(self.storage.get_bytes(key))
            disruptions.append(Disruption(at=values["at"], lost=tuple(values["lost"])))
        return tuple(disruptions)

    def launch(self, step: str, attempt: int) -> int:
        """Return the launch number of a step: 0 for the first, plus one per further attempt or disruption."""
        return attempt + len(self.storage.keys(f"{self._prefix}/{step}"))

    def record_gang_end(self, step: str, launch: int, failure: Failure) -> None:
        """Store why the gang ended. Called on every surviving node; all store the same value."""
        cause = {"kind": failure.kind, "host": failure.host}
        self.storage.put_bytes(self._gang_end_key(step, launch), json.dumps(cause).encode())

    def gang_end(self, step: str, launch: int) -> GangEnd | None:
        """Return why the gang of a launch ended; None if no node stored it."""
        try:
            return GangEnd(**json.loads(self.storage.get_bytes(self._gang_end_key(step, launch))))
        except FileNotFoundError:
            return None

    def failures(self, step: str, launches: int) -> int:
        """Count the first ``launches`` launches whose gang failed by itself."""
        ends = (self.gang_end(step, launch) for launch in range(launches))
        return sum(end is not None and not end.is_loss for end in ends)

    @property
    def _prefix(self) -> str:
        return f"disruptions/{self.run}"

    def _gang_end_key(self, step: str, launch: int) -> str:
        return f"gang-ends/{self.run}/{step}.{launch}.json"


def of_run(run: str) -> Disruptions:
    """Return the disruptions of a run of the running flow."""
    return Disruptions(storage=datastore(), run=run)
