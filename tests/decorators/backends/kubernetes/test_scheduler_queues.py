"""Queues of Volcano and KAI: found by name, refused if they can never admit the run, named in the pods."""

from __future__ import annotations

from typing import Any

import pytest

from decorators.backends.findings import Findings
from decorators.backends.interface import ClusterFacts, StepRequest
from decorators.backends.kubernetes import queues
from decorators.backends.kubernetes.nodes import PodSettings, Preflight
from decorators.backends.kubernetes.request import values_for
from decorators.backends.options import Options
from estimator.hardware.cluster.api import ApiRefusedError
from tests.decorators.backends.kubernetes.conftest import TWO

POD = {"cpu": 100.0, "memory": 500 * 2.0**30, "nvidia.com/gpu": 8.0}
VOLCANO, KAI = "/apis/scheduling.volcano.sh/v1beta1/queues/", "/apis/scheduling.run.ai/v2/queues/"


def volcano(state: str = "Open", **capability: str) -> Any:
    return {"metadata": {"name": "q"}, "spec": {"capability": capability}, "status": {"state": state}}


def kai(name: str = "q", parent: str = "", children: tuple[str, ...] = (), **limits: float) -> Any:
    resources = {resource: {"quota": 0, "limit": limit} for resource, limit in limits.items()}
    spec = {"resources": resources, **({"parentQueue": parent} if parent else {})}
    return {"metadata": {"name": name}, "spec": spec, "status": {"childQueues": list(children)}}


def rows(objects: dict[str, Any], **options: Any) -> list[tuple[str, str]]:
    """Return state and text of the findings on the queue "q", with these objects by path."""
    groups = {path.rpartition("/queues/")[0].rpartition("/")[0] for path in objects}

    class Api:
        def get(self, path: str, **_: str) -> Any:
            if path in groups:
                return {}
            if path not in objects:
                raise ApiRefusedError(404, "")
            return objects[path]

    preflight = Preflight(
        api=Api(),  # type: ignore[arg-type]
        request=TWO,
        options=Options(queue="q", **options),
        pods=PodSettings(),
        minimum=None,
        findings=Findings(where="here"),
    )
    queues.queue(preflight, pod=POD)
    return [(row.state, row.detail) for row in preflight.findings.rows]


def test_a_queue_is_found_by_its_name_unless_its_system_is_named() -> None:
    assert rows({VOLCANO + "q": volcano()}) == [
        ("ok", "q, of Volcano; it places each node by itself, so nodes may wait for others")
    ]
    assert rows({KAI + "q": kai()}) == [("ok", "q, of KAI")]
    assert rows({KAI + "q": kai()}, queue_system="volcano") == [("no", "Volcano has no queue 'q'")]
    assert rows({KAI + "other": kai()}) == [("no", "'q' is a queue of Kueue, which is not installed")]


@pytest.mark.parametrize(
    ("objects", "problems"),
    [
        ({VOLCANO + "q": volcano("Closed")}, ["Volcano's queue q is closed"]),
        (
            {VOLCANO + "q": volcano(**{"nvidia.com/gpu": "8"})},
            ["Volcano's queue q allows 8 of 16 nvidia.com/gpu"],
        ),
        ({VOLCANO + "q": volcano(**{"nvidia.com/gpu": "16", "cpu": "200"})}, []),
        ({KAI + "q": kai(gpu=8, cpu=-1)}, ["KAI's queue q allows 8 of 16 nvidia.com/gpu"]),
        ({KAI + "q": kai(gpu=16, cpu=200_000)}, []),
        ({KAI + "q": kai(cpu=100_000)}, ["KAI's queue q allows 100 of 200 cpu"]),
        ({KAI + "q": kai(memory=1000)}, ["KAI's queue q allows 1Gi of 1000Gi memory"]),
        (
            {KAI + "q": kai(parent="all"), KAI + "all": kai("all", gpu=4)},
            ["KAI's queue q allows 4 of 16 nvidia.com/gpu"],
        ),
        ({KAI + "q": kai(children=("a", "b"))}, ["KAI's queue q runs no jobs, its child queues do: a, b"]),
        ({KAI + "q": kai(parent="q")}, []),
    ],
)
def test_a_queue_that_can_never_admit_the_run_is_refused(
    objects: dict[str, Any], problems: list[str]
) -> None:
    assert [text for state, text in rows(objects) if state == "no"] == problems


@pytest.mark.parametrize(
    ("system", "chosen", "labels", "patches"),
    [
        (None, "auto", {"kueue.x-k8s.io/queue-name": "q", "kueue.x-k8s.io/priority-class": "high"}, ()),
        ("kai", "auto", {"kai.scheduler/queue": "q"}, ({"spec": {"schedulerName": "kai-scheduler"}},)),
        (
            None,
            "volcano",
            None,
            (
                {
                    "metadata": {"annotations": {"scheduling.volcano.sh/queue-name": "q"}},
                    "spec": {"schedulerName": "volcano"},
                },
            ),
        ),
    ],
)
def test_every_pod_of_a_run_names_its_queue_and_scheduler(
    system: str | None, chosen: str, labels: dict[str, str] | None, patches: tuple[Any, ...]
) -> None:
    values = values_for(
        StepRequest(
            backend="kubernetes",
            request=TWO,
            facts=ClusterFacts(queue_system=system),
            options=Options(queue="q", queue_system=chosen, priority="high"),
        )
    )
    assert values.compute.get("labels") == labels
    assert values.pod_patches == patches
