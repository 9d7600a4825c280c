"""Batch schedulers that may manage a queue: Kueue, Volcano and KAI, and what pods carry for each.

Kueue admits a JobSet as a whole and leaves the placement to the cluster's scheduler. Volcano and KAI are
schedulers. JobSet starts node 0 before the others, so KAI places the other nodes as a group; Volcano places
each node by itself.
"""

from __future__ import annotations

from typing import Any

VOLCANO, KAI = "scheduling.volcano.sh/v1beta1", "scheduling.run.ai/v2"
APIS = {"volcano": VOLCANO, "kai": KAI}
NAMES = {"kueue": "Kueue", "volcano": "Volcano", "kai": "KAI"}
KUEUE_QUEUE = "kueue.x-k8s.io/queue-name"
KUEUE_PRIORITY = "kueue.x-k8s.io/priority-class"
VOLCANO_QUEUE = "scheduling.volcano.sh/queue-name"
KAI_QUEUE = "kai.scheduler/queue"


def labels(system: str, queue: str, priority: str | None) -> dict[str, str]:
    """Return the labels of Jobs, JobSets and pods in a queue."""
    if system == "kueue":
        return {KUEUE_QUEUE: queue, **({KUEUE_PRIORITY: priority} if priority else {})}
    return {KAI_QUEUE: queue} if system == "kai" else {}


def patch(system: str, queue: str) -> dict[str, Any] | None:
    """Return the patch of the pods in a queue; None for Kueue, which needs labels only."""
    if system == "volcano":
        return {"metadata": {"annotations": {VOLCANO_QUEUE: queue}}, "spec": {"schedulerName": "volcano"}}
    return {"spec": {"schedulerName": "kai-scheduler"}} if system == "kai" else None
