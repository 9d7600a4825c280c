"""Disruptions by the cluster are distinguished from failures by the pods of a job."""

from __future__ import annotations

from typing import Any

import pytest

from decorators._metaflow import WaitedJob
from decorators.backends.interface import GangEnd
from decorators.backends.kubernetes import losses
from decorators.backends.kubernetes.losses import Pods, judge
from tests.lab.api import Json


def pod(name: str, phase: str = "Running", *, deleted: str = "", finished: str = "", **status: Any) -> Json:
    """``deleted``: second at which deletion was requested, with a grace period of 60 s."""
    metadata: Json = {"name": name}
    if deleted:
        minute, second = divmod(60 + int(deleted), 60)
        metadata |= {"deletionTimestamp": f"2026-01-01T00:0{minute}:{second:02}Z"}
        metadata["deletionGracePeriodSeconds"] = 60
    if finished:
        ended = {"exitCode": 1, "reason": "Error", "finishedAt": f"2026-01-01T00:00:{finished}Z"}
        status["containerStatuses"] = [{"state": {"terminated": ended}}]
    spec = {"nodeName": "n", "hostname": f"js-{name}"}
    return {"metadata": metadata, "spec": spec, "status": {"phase": phase, **status}}


EVICTED = {"reason": "Evicted", "message": "The node was low on resource: memory."}
OWN_DISK = {"reason": "Evicted", "message": "Pod ephemeral local storage usage exceeds the total limit of x."}
TARGET = {"type": "DisruptionTarget", "status": "True"}  # Kubernetes from 1.26 on
PREEMPTED = {"conditions": [TARGET | {"reason": "PreemptionByScheduler", "message": "for p"}]}
DRAINED = {"conditions": [TARGET | {"reason": "EvictionByEvictionAPI", "message": "Eviction API: evicting"}]}
BOTH_RUN = [pod("c-0"), pod("w-0")]


@pytest.mark.parametrize(
    ("polls", "ending", "lost"),
    [
        pytest.param(
            [[pod("c-0", "Failed", finished="20"), pod("w-0", "Failed", **EVICTED)]],
            None,
            ["pod w-0 on n: Evicted: The node was low on resource: memory"],
            id="evicted, and the other node's task has ended after it",
        ),
        pytest.param([[pod("w-0", "Failed", **OWN_DISK)]], None, None, id="evicted for its own disk"),
        pytest.param(
            [[pod("c-0", "Failed", finished="05"), pod("w-0", **PREEMPTED)]],
            None,
            ["pod w-0 on n: PreemptionByScheduler: for p"],
            id="preempted",
        ),
        pytest.param(
            [[pod("c-0", "Failed", finished="30"), pod("w-0", "Failed", deleted="20", **DRAINED)]],
            None,
            ["pod w-0 on n: EvictionByEvictionAPI: Eviction API: evicting"],
            id="evicted as kubectl drain does",
        ),
        pytest.param([BOTH_RUN, [pod("c-0")], []], None, ["pod w-0", "pod c-0"], id="gone, one by one"),
        pytest.param(
            [BOTH_RUN, [pod("w-0")], [pod("w-0", "Failed")]], None, ["pod c-0"], id="gone before it failed"
        ),
        pytest.param(
            [BOTH_RUN, [pod("c-0"), pod("w-0", "Failed")], [pod("w-0", "Failed")], [pod("w-0", "Failed")]],
            None,
            None,
            id="failed before the other was gone",
        ),
        pytest.param(
            [[pod("c-0", "Failed", finished="30"), pod("w-0", "Failed", deleted="20", finished="25")]],
            None,
            ["pod w-0 on n: deleted"],
            id="told to go before the other failed",
        ),
        pytest.param(
            [BOTH_RUN, [pod("c-0"), pod("w-0", deleted="21")], [pod("c-0")], [pod("c-0", "Failed")]],
            None,
            ["pod w-0 on n: deleted"],
            id="deleted and gone before the other failed at an unknown time",
        ),
        pytest.param(
            [[pod("c-0", deleted="21"), pod("w-0", "Failed", finished="20")]],
            None,
            None,
            id="failed, and then the JobSet has deleted the other",
        ),
        pytest.param(
            [[pod("c-0", "Failed", finished="20"), pod("w-0", deleted="21")]],
            GangEnd(kind="node", host="js-w-0.js.namespace.svc.cluster.local"),
            ["pod w-0 on n: lost"],
            id="a silent node, of which the API server knows nothing yet",
        ),
        pytest.param(
            [[pod("c-0", deleted="21"), pod("w-0", "Failed", finished="20")]],
            GangEnd(kind="node", host="js-w-0.js.namespace.svc.cluster.local"),
            None,
            id="a node's task that has crashed is a failure, whatever the others say",
        ),
        pytest.param(
            [BOTH_RUN, []],
            GangEnd(kind="rank", host="js-w-0"),
            None,
            id="a rank has failed, and no pod is left to tell",
        ),
        pytest.param([[pod("c-0", "Failed", finished="20")]], None, None, id="failed"),
        pytest.param([BOTH_RUN], None, None, id="nothing has happened to the pods"),
    ],
)
def test_disruptions_are_distinguished_from_failures(
    polls: list[list[Json]], ending: GangEnd | None, lost: list[str] | None
) -> None:
    pods = Pods()
    for observe in polls:
        pods.note(observe)
    end = judge(pods.pods.values(), ending)
    if lost is None:
        assert end is None
    else:
        assert len(end.lines) == len(lost)
        assert set(lost) == {line if line in lost else line.partition(" on ")[0] for line in end.lines}


class Api:
    """Responds with these pods, one list per query, the last one repeated; the job still exists."""

    def __init__(self, *answers: list[Json]) -> None:
        self.answers = list(answers)

    def __enter__(self) -> Api:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def get(self, path: str, **_: str) -> Json:
        if not path.endswith("/pods"):
            return {"metadata": {}}
        return {"items": self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]}


def test_a_loss_is_classified_after_all_pods_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    failed_pod = pod("w-0", "Failed", finished="30", **PREEMPTED)
    api, slept = Api([pod("c-0"), failed_pod], [failed_pod]), list[float]()
    monkeypatch.setattr(losses, "ClusterApi", lambda: api)
    monkeypatch.setattr(losses.time, "sleep", slept.append)
    monkeypatch.setattr(losses, "_pods", {})
    job = WaitedJob(backend="kubernetes", kind="jobset", name="js-1", namespace="n")
    loss = losses.lost(job, lambda: None)
    assert slept == [1]
    assert loss is not None
    assert [line.partition(":")[0] for line in loss.lines] == ["pod w-0 on n"]


def test_pods_are_not_queried_again_at_once() -> None:
    pods = Pods()
    assert pods.is_time()
    pods.note(BOTH_RUN)
    assert not pods.is_time()


def test_pods_are_recorded_for_kubernetes_jobs_only(monkeypatch: pytest.MonkeyPatch) -> None:
    noted: dict[str, Pods] = {}
    monkeypatch.setattr(losses, "_pods", noted)
    monkeypatch.setattr(losses, "ClusterApi", lambda: Api(BOTH_RUN))
    losses.observe(WaitedJob(backend="batch", kind="batch job", name="b-1"))
    losses.observe(WaitedJob(backend="kubernetes", kind="jobset", name="js-1", namespace="n"))
    assert {name: sorted(pods.pods) for name, pods in noted.items()} == {"js-1": ["c-0", "w-0"]}
