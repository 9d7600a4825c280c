"""The user's options for the target of a run in addition to its size: queue, zone, priority, time limits."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from decorators.backends import pod_template
from estimator import hardware
from estimator.errors import UserError
from launchers import settings
from launchers.settings.sections import Resources

QUEUES_VARIABLE = "FINETUNE_QUEUES"  # "H100=queue-a,A10G=queue-b"
# Of a flow, and by the same names in its settings; then those of the settings alone
_FLAGS = (
    "queue",
    "zone",
    "priority",
    "priority_class",
    "pending_timeout",
    "team",
    "max_disruptions",
    "fabric",
)
_SETTINGS = (*_FLAGS, "queues", "termination_grace_s", "pod_template")
_OURS = re.compile(rf"resources\.({'|'.join(_SETTINGS)})\b")  # of what is given with --set


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Raises UserError for a queue of a GPU that no table lists."""

    queue: str | None = None  # a Batch job queue, or a Kueue LocalQueue
    queues: tuple[tuple[str, str], ...] = ()  # (GPU, queue), where no queue is named
    zone: str | None = None
    priority: str | None = None  # a Kueue WorkloadPriorityClass
    priority_class: str | None = None  # of Kubernetes, for all pods of a run
    pending_timeout: float = 30.0  # minutes
    team: str | None = None  # that the run is for
    fabric: str = "auto"
    # A patch of the training pods' template; a mapping has no hash
    pod_template: Mapping[str, Any] | None = field(default=None, hash=False)
    max_disruptions: int = 20
    termination_grace_s: int = 60
    preflight: bool = True

    def __post_init__(self) -> None:
        for gpu, _ in self.queues:
            hardware.current().gpu(gpu)

    def queue_for(self, gpu: str | None) -> str | None:
        """The queue of a run on that GPU type."""
        if self.queue or gpu is None:
            return self.queue
        known_as = hardware.current().gpu(gpu).name
        return next(
            (queue for name, queue in self.queues if hardware.current().gpu(name).name == known_as), None
        )

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> Options:
        """From a flow's parameters and configs by name, as ``StepView.flow_values`` gives them.

        Reads what there is of ``queue``, ``zone``, ``priority``, ``priority_class``, ``pending_timeout``,
        ``team``, ``no_preflight`` and ``set``, the settings file under ``settings``, and FINETUNE_QUEUES.
        Raises UserError.
        """
        config = values.get("settings")
        written = config.get("resources") if isinstance(config, Mapping) else None
        wishes = {
            name: value
            for name, value in (written.items() if isinstance(written, Mapping) else ())
            if name in _SETTINGS
        }
        flags = {f"resources.{name}": values[name] for name in _FLAGS if values.get(name) not in (None, "")}
        overrides = [item for item in values.get("set") or () if _OURS.match(item)]
        chosen = settings.build({"resources": wishes}, overrides, flags)
        return cls.from_resources(chosen.resources, preflight=not values.get("no_preflight"))

    @classmethod
    def from_resources(cls, asked: Resources, *, preflight: bool = True) -> Options:
        queues = {**_queues(os.environ.get(QUEUES_VARIABLE, "")), **asked.queues}
        return cls(
            queue=asked.queue,
            queues=tuple(queues.items()),
            zone=asked.zone,
            priority=asked.priority,
            priority_class=asked.priority_class,
            pending_timeout=asked.pending_timeout,
            team=asked.team,
            fabric=asked.fabric,
            pod_template=None if asked.pod_template is None else pod_template.read(asked.pod_template),
            max_disruptions=asked.max_disruptions,
            termination_grace_s=asked.termination_grace_s,
            preflight=preflight,
        )


def _queues(text: str) -> dict[str, str]:
    queues = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        gpu, separator, queue = part.partition("=")
        if not (gpu and separator and queue):
            raise UserError(
                f"{QUEUES_VARIABLE}: {part!r} names no queue.",
                f"Write {QUEUES_VARIABLE}=H100=queue-a,A10G=queue-b",
            )
        queues[gpu.strip()] = queue.strip()
    return queues
