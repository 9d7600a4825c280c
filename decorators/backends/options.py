"""The user's options for the target of a run, except its size: queue, zone, priority, time limits."""

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
# Names of flow parameters that are also settings, then names that are settings only
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
_SETTINGS = (*_FLAGS, "queues", "queue_system", "termination_grace_s", "pod_template")
_RESOURCE_SETTING = re.compile(rf"resources\.({'|'.join(_SETTINGS)})\b")  # an item of --set


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Options for the target. Raises UserError for a queue of an unknown GPU."""

    queue: str | None = None  # a Batch job queue, or a queue of Kueue, Volcano or KAI
    queues: tuple[tuple[str, str], ...] = ()  # (GPU, queue), used if no queue is named
    queue_system: str = "auto"  # what manages the queue on Kubernetes
    zone: str | None = None
    priority: str | None = None  # a Kueue WorkloadPriorityClass
    priority_class: str | None = None  # Kubernetes PriorityClass of all pods of a run
    pending_timeout: float = 30.0  # minutes
    team: str | None = None  # label for cost allocation
    fabric: str = "auto"
    # Patch of the training pods' template; excluded from the hash because mappings are not hashable
    pod_template: Mapping[str, Any] | None = field(default=None, hash=False)
    max_disruptions: int = 20
    termination_grace_s: int = 60
    preflight: bool = True

    def __post_init__(self) -> None:
        for gpu, _ in self.queues:
            hardware.current().gpu(gpu)

    def queue_for(self, gpu: str | None) -> str | None:
        """Return the queue of a run on a GPU type."""
        if self.queue or gpu is None:
            return self.queue
        known_as = hardware.current().gpu(gpu).name
        return next(
            (queue for name, queue in self.queues if hardware.current().gpu(name).name == known_as), None
        )

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> Options:
        """Read the options from a flow's parameters and configs by name, as from ``StepView.flow_values``.

        Uses ``queue``, ``zone``, ``priority``, ``priority_class``, ``pending_timeout``, ``team``,
        ``no_preflight`` and ``set`` if present, the settings file under ``settings``, and FINETUNE_QUEUES.
        Raises UserError.
        """
        config = values.get("settings")
        configured = config.get("resources") if isinstance(config, Mapping) else None
        resource_settings = {
            name: value
            for name, value in (configured.items() if isinstance(configured, Mapping) else ())
            if name in _SETTINGS
        }
        flags = {f"resources.{name}": values[name] for name in _FLAGS if values.get(name) not in (None, "")}
        overrides = [item for item in values.get("set") or () if _RESOURCE_SETTING.match(item)]
        chosen = settings.build({"resources": resource_settings}, overrides, flags)
        return cls.from_resources(chosen.resources, preflight=not values.get("no_preflight"))

    @classmethod
    def from_resources(cls, resources: Resources, *, preflight: bool = True) -> Options:
        queues = {**_queues(os.environ.get(QUEUES_VARIABLE, "")), **resources.queues}
        return cls(
            queue=resources.queue,
            queues=tuple(queues.items()),
            queue_system=resources.queue_system,
            zone=resources.zone,
            priority=resources.priority,
            priority_class=resources.priority_class,
            pending_timeout=resources.pending_timeout,
            team=resources.team,
            fabric=resources.fabric,
            pod_template=None
            if resources.pod_template is None
            else pod_template.read(resources.pod_template),
            max_disruptions=resources.max_disruptions,
            termination_grace_s=resources.termination_grace_s,
            preflight=preflight,
        )


def _queues(text: str) -> dict[str, str]:
    queues = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        gpu, separator, queue = part.partition("=")
        if not (gpu and separator and queue):
            raise UserError(
                f"{QUEUES_VARIABLE}: {part!r} has no queue.",
                f"Write {QUEUES_VARIABLE}=H100=queue-a,A10G=queue-b",
            )
        queues[gpu.strip()] = queue.strip()
    return queues
