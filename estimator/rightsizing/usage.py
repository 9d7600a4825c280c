"""Resources that one task requested and used, with conversion to and from JSON for a datastore."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Literal

from estimator.formatting import MIB, format_bytes
from estimator.untrusted import parse_json

SCHEMA_VERSION = 1
IDLE_BYTES = 64 * MIB  # of a GPU: a CUDA context alone takes more
Ending = Literal["running", "succeeded", "failed", "out of memory", "out of GPU memory"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Resources of one task (one node). None: not requested, or unknown."""

    cpu: float | None = None  # cores
    memory_mib: int | None = None
    gpus: int | None = None
    gpu_type: str | None = None  # a name of the GPU table, or the driver's

    def describe(self) -> str:
        """Format the known sizes: "2 CPU, 4.0 GiB, 1x A10G"."""
        parts = []
        if self.cpu is not None:
            parts.append(f"{self.cpu:g} CPU")
        if self.memory_mib is not None:
            parts.append(format_bytes(self.memory_mib * MIB))
        if self.gpus:
            parts.append(f"{self.gpus}x {self.gpu_type or 'GPU'}")
        return ", ".join(parts) or "nothing"


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuUsage:
    """One GPU during a task."""

    name: str
    total_bytes: int
    peak_bytes: int  # peak usage minus the usage before the task
    utilization: float | None  # 0 to 1: share of the time in which some kernel ran

    @property
    def in_use(self) -> bool:
        """Whether the task used the GPU."""
        return self.peak_bytes >= IDLE_BYTES or (self.utilization or 0.0) >= 0.01


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """Requested and used resources of one attempt of one task."""

    flow: str
    step: str
    run: str
    task: str
    attempt: int
    at: float  # seconds since the epoch, of the start
    seconds: float
    ending: Ending
    requested: Sizes
    parameters: tuple[tuple[str, str], ...]
    """Parameters of the run: numbers as they are, other values as a digest, so that no secret is kept."""
    memory_bytes: int | None  # peak of the task's processes
    cpu: float | None  # cores that 90 % of the samples stay below
    gpus: tuple[GpuUsage, ...] = ()

    def to_json(self) -> str:
        """Serialize to JSON."""
        return json.dumps({"schema": SCHEMA_VERSION, **dataclasses.asdict(self)})

    @classmethod
    def from_json(cls, text: str) -> Usage:
        """Deserialize. Raises ValueError for anything that :meth:`to_json` has not written."""
        try:
            values = parse_json(text)
            if values.pop("schema") != SCHEMA_VERSION:
                raise ValueError("a record of another version")
            values["requested"] = Sizes(**values["requested"])
            values["parameters"] = tuple((str(name), str(value)) for name, value in values["parameters"])
            values["gpus"] = tuple(GpuUsage(**gpu) for gpu in values["gpus"])
            return cls(**values)
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"no record of a task's usage: {error}") from None
