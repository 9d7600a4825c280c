"""Patches of a step's pod template for settings that ``@kubernetes`` has no arguments for.

At launch the patches of all steps are stored in an environment variable for the process that submits the
pods. In the patches the step's container is called ``main``, whatever Metaflow calls it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

from decorators import _metaflow
from decorators.backends.kubernetes.affinity import affinity_of
from decorators.backends.strategic_merge import merge

PRIORITY_VARIABLE = "FINETUNE_PRIORITY_CLASS"  # for all pods of the run; empty: the cluster's default
PATCHES_VARIABLE = "FINETUNE_POD_PATCHES"  # JSON: step -> patches
MAIN = "main"  # name of the step's container in Argo Workflows
PID_FILE = "finetune-task.pid"  # in TMPDIR, written by a task that stores a checkpoint on SIGTERM
# The container's first process is a shell, which ignores SIGTERM. Without a PID file there is nothing to
# store, and all processes are terminated at once.
_TERMINATE = f'kill -TERM "$(cat "${{TMPDIR:-/tmp}}/{PID_FILE}" 2>/dev/null)" 2>/dev/null || kill -TERM -1'
_NODE_NAME = {"name": "NODE_NAME", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}

Json = dict[str, Any]


def merged_variable(step: str, patches: Sequence[Json]) -> dict[str, str]:
    """Return the variable that holds the patches of all steps, with this step's patches replaced."""
    return {PATCHES_VARIABLE: json.dumps({**_read_variable(), step: list(patches)})}


def install() -> None:
    """Apply the patches to the pods that this process requests."""

    def patches_of(step: str, jobset: str | None) -> list[Json]:
        return [_common_patch(jobset), *_read_variable().get(step, [])]

    _metaflow.shape_pods(patches_of, merge, main=MAIN)


def graceful(grace_period_s: int) -> Json:
    """Return the patch of the grace period, in which a deleted pod can store a checkpoint."""
    hook = {"exec": {"command": ["sh", "-c", _TERMINATE]}}
    main = {"name": MAIN, "lifecycle": {"preStop": hook}}
    return {"spec": {"terminationGracePeriodSeconds": grace_period_s, "containers": [main]}}


def _common_patch(jobset: str | None) -> Json:
    """Return the patch of every pod: node name, placement next to the JobSet's other pods, priority class."""
    spec: Json = {"containers": [{"name": MAIN, "env": [_NODE_NAME]}]}
    if jobset:
        spec["affinity"] = affinity_of(jobset)
    if priority_class := os.environ.get(PRIORITY_VARIABLE):
        spec["priorityClassName"] = priority_class
    return {"spec": spec}


def _read_variable() -> dict[str, list[Json]]:
    patches: dict[str, list[Json]] = json.loads(os.environ.get(PATCHES_VARIABLE) or "{}")
    return patches
