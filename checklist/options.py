"""What a user asks for, checked when it is made."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from checklist.checks import PROFILES, Check, Profile, phases_of, select
from checklist.effort import EFFORTS, Effort
from checklist.measurements import PHASES, PhaseName
from checklist.round_robin import schedule
from estimator.errors import UserError

Device = Literal["auto", "cpu", "cuda"]
MOST_NODES = 4096


ROUNDS_WITHIN_LIMIT = 8  # of pairs; more of them make the phase's limit longer in proportion


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """One run of the checklist. Raises UserError where a value can't be."""

    profile: Profile = "quick"
    nodes: int = 2
    gpus_per_node: int | None = None
    """None: all that a node has; on CPUs one process for each node."""
    device: Device = "auto"
    """auto: GPUs where there are any."""
    only: tuple[str, ...] = ()
    """Checks to do; none named: all."""
    skip: tuple[str, ...] = ()
    time_limits_s: Mapping[PhaseName, float] = field(default_factory=dict)
    """Instead of the profile's limits."""
    op_limit_s: float | None = None
    """Instead of the profile's limit of one operation."""
    start_limit_s: float = 60.0
    """How long all ranks may take to be there; on a cluster its nodes and images may first have to come."""
    thresholds: Path | None = None
    """A user's table above the shipped one."""
    system: str | None = None
    """What the thresholds call this system, where its machine type and GPU don't tell."""
    work_directory: Path | None = None
    """The folder of each node whose speed is measured. None: its folder for temporary files."""
    datastore: str | None = None
    """The store whose speed is measured: a folder that is there on each node, or s3://bucket/prefix.

    None: none is measured. S3's endpoint is METAFLOW_S3_ENDPOINT_URL's or AWS_ENDPOINT_URL's of each node.
    """
    storage_bytes: int | None = None
    """What is written and read in each of them, instead of the profile's size."""
    seed: int = 0
    """Of the rounds of pairs above 32 nodes; the same on every node."""

    def __post_init__(self) -> None:
        if self.profile not in PROFILES:
            raise _unknown("profile", self.profile, PROFILES)
        if self.device not in ("auto", "cpu", "cuda"):
            raise _unknown("device", self.device, ("auto", "cpu", "cuda"))
        if not 1 <= self.nodes <= MOST_NODES:
            raise UserError(
                f"--nodes {self.nodes} is not possible.", f"Give a number from 1 to {MOST_NODES}."
            )
        if self.gpus_per_node is not None and self.gpus_per_node < 1:
            raise UserError(
                f"--gpus-per-node {self.gpus_per_node} is not possible.",
                "Give a number from 1 up, or leave it out to use all that a node has.",
            )
        for phase, limit in self.time_limits_s.items():
            if phase not in PHASES:
                raise _unknown("phase", phase, PHASES)
            _check_limit(f"phase {phase}", limit)
        if self.op_limit_s is not None:
            _check_limit("an operation", self.op_limit_s)
        _check_limit("the start", self.start_limit_s)
        if self.storage_bytes is not None and self.storage_bytes < 1:
            raise UserError(f"{self.storage_bytes} bytes can't be written.", "Give a number from 1 up.")
        if self.datastore is not None and not measurable(self.datastore):
            raise UserError(
                f"The datastore {self.datastore!r} can't be measured.",
                "Give --datastore a folder that every node has, or s3://bucket/prefix.",
            )
        select(self.only, self.skip)  # raises for names that there are not

    @property
    def effort(self) -> Effort:
        return EFFORTS[self.profile]

    @property
    def checks(self) -> tuple[Check, ...]:
        """The checks to do, in order."""
        return select(self.only, self.skip)

    @property
    def phases(self) -> tuple[PhaseName, ...]:
        """The phases that those checks need, in order."""
        return phases_of(self.checks)

    def limit_s(self, phase: PhaseName) -> float:
        """Seconds after which a phase is ended."""
        if phase in self.time_limits_s:
            return float(self.time_limits_s[phase])
        limit = float(self.effort.phase_limits_s[phase])
        if phase == "pairs":
            limit *= max(1.0, len(schedule(self.nodes, seed=self.seed)) / ROUNDS_WITHIN_LIMIT)
        return limit

    @property
    def hang_limit_s(self) -> float:
        """Seconds after which an operation counts as hung."""
        return self.effort.op_limit_s if self.op_limit_s is None else self.op_limit_s

    def processes_per_node(self, visible_gpus: int) -> int:
        """Ranks of each node, given the GPUs of this one. Raises UserError where there are too few."""
        if self.device == "cpu" or (self.device == "auto" and not visible_gpus):
            return self.gpus_per_node or 1
        if not visible_gpus:
            raise UserError("There is no GPU on this machine.", "Leave out --device cuda to test on CPUs.")
        processes = self.gpus_per_node or visible_gpus
        if processes > visible_gpus:
            raise UserError(
                f"--gpus-per-node {processes} is more than the {visible_gpus} of this machine.",
                f"Give at most {visible_gpus}, or leave it out.",
            )
        return processes


def measurable(datastore: str) -> bool:
    """Whether that store is of a kind that can be measured: a folder, or S3 with a bucket."""
    scheme, separator, rest = datastore.partition("://")
    return bool(rest.split("/")[0]) and scheme == "s3" if separator else bool(datastore)


def names(text: str | Iterable[str]) -> tuple[str, ...]:
    """Names as people give them: "mesh,pairs", several flags, or both."""
    parts = [text] if isinstance(text, str) else list(text)
    return tuple(name.strip() for part in parts for name in part.split(",") if name.strip())


def _check_limit(what: str, limit: float) -> None:
    if not (math.isfinite(limit) and limit > 0):
        raise UserError(f"A time limit of {limit} s for {what} is not possible.", "Give seconds above 0.")


def _unknown(what: str, name: str, known: Iterable[str]) -> UserError:
    near = difflib.get_close_matches(str(name), list(known), n=1)
    hint = f"Did you mean {near[0]}? " if near else ""
    return UserError(f"There is no {what} {name!r}.", f"{hint}It takes {', '.join(known)}.")
