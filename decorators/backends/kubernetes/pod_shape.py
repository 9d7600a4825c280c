"""Patches of a step's pod template, for what ``@kubernetes`` has no arguments.

Where a run is launched a step's patches are remembered in an environment variable, for the process that
submits its pods. In them a container ``main`` is the step's own, whatever Metaflow calls it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

from decorators import _metaflow
from decorators.backends.kubernetes.affinity import affinity_of
from decorators.backends.strategic_merge import merge

PRIORITY_VARIABLE = "FINETUNE_PRIORITY_CLASS"  # of all pods of the run; empty: the cluster's default
PATCHES_VARIABLE = "FINETUNE_POD_PATCHES"  # JSON: step -> patches
MAIN = "main"  # as Argo Workflows calls the container of a step
PID_FILE = "finetune-task.pid"  # below TMPDIR: of a task that stores a checkpoint when it is told to go
# A container's first process here is a shell, which SIGTERM doesn't reach. Where nothing is to be stored all
# others end at once.
_TELL = f'kill -TERM "$(cat "${{TMPDIR:-/tmp}}/{PID_FILE}" 2>/dev/null)" 2>/dev/null || kill -TERM -1'
_NODE_NAME = {"name": "NODE_NAME", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}

Json = dict[str, Any]


def remembered_with(step: str, patches: Sequence[Json]) -> dict[str, str]:
    """The variable that carries all steps' patches, with other ones for this step."""
    return {PATCHES_VARIABLE: json.dumps({**_remembered(), step: list(patches)})}


def install() -> None:
    """From now on give the pods that this process asks for their patches."""

    def patches_of(step: str, jobset: str | None) -> list[Json]:
        return [_of_every_pod(jobset), *_remembered().get(step, [])]

    _metaflow.shape_pods(patches_of, merge, main=MAIN)


def graceful(grace_s: int) -> Json:
    """The patch by which a pod is told that it has to go, so many seconds before its end."""
    hook = {"exec": {"command": ["sh", "-c", _TELL]}}
    main = {"name": MAIN, "lifecycle": {"preStop": hook}}
    return {"spec": {"terminationGracePeriodSeconds": grace_s, "containers": [main]}}


def _of_every_pod(jobset: str | None) -> Json:
    spec: Json = {"containers": [{"name": MAIN, "env": [_NODE_NAME]}]}
    if jobset:
        spec["affinity"] = affinity_of(jobset)
    if priority_class := os.environ.get(PRIORITY_VARIABLE):
        spec["priorityClassName"] = priority_class
    return {"spec": spec}


def _remembered() -> dict[str, list[Json]]:
    patches: dict[str, list[Json]] = json.loads(os.environ.get(PATCHES_VARIABLE) or "{}")
    return patches
