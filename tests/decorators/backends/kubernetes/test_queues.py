"""Kueue queues: lookup, quotas that can admit the run, and the topology of their flavors."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from decorators.backends.findings import Findings
from decorators.backends.kubernetes import queues
from decorators.backends.kubernetes.nodes import PodSettings, Preflight
from decorators.backends.options import Options
from estimator.hardware.cluster.api import ApiRefusedError
from tests.decorators.backends.kubernetes.conftest import TWO

KUEUE = "/apis/kueue.x-k8s.io"
VERSION = f"{KUEUE}/v1beta1"
INSTALLED = {KUEUE: {"preferredVersion": {"groupVersion": "kueue.x-k8s.io/v1beta1"}}}
LOCAL = f"{VERSION}/namespaces/train/localqueues"
CLUSTER = f"{VERSION}/clusterqueues"
POD = {"cpu": 100.0, "memory": 500 * 2.0**30, "nvidia.com/gpu": 8.0}
NEVER = "it can never admit the run"


class Objects:
    """An API server with these objects by path; paths in ``denied`` may not be read."""

    def __init__(self, objects: dict[str, Any], denied: tuple[str, ...] = ()) -> None:
        self.objects, self.denied = objects, denied

    def get(self, path: str, **_: str) -> Any:
        if path in self.denied or path not in self.objects:
            raise ApiRefusedError(403 if path in self.denied else 404, "")
        return self.objects[path]


def local(name: str = "research", **overrides: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": name},
        "spec": {"clusterQueue": "all", **overrides.pop("spec", {})},
        **overrides,
    }


def cluster(*flavors: dict[str, Any], name: str = "all", **spec: Any) -> dict[str, Any]:
    """Return a ClusterQueue with CPUs, memory and the GPUs of these flavors."""
    quotas = [
        {
            "name": f"h100-{number}",
            "resources": [
                {"name": "cpu", "nominalQuota": "1k"},
                {"name": "memory", "nominalQuota": "9Ti"},
                {"name": "nvidia.com/gpu", **flavor},
            ],
        }
        for number, flavor in enumerate(flavors)
    ]
    group = {"coveredResources": ["cpu", "memory", "nvidia.com/gpu"], "flavors": quotas}
    return {"metadata": {"name": name}, "spec": {"resourceGroups": [group], **spec}}


def preflight_of(
    objects: dict[str, Any], queue: str = "research", nodes: int = 2, **overrides: Any
) -> Preflight:
    return Preflight(
        api=Objects(INSTALLED | objects, **overrides),  # type: ignore[arg-type]
        request=dataclasses.replace(TWO, nodes=nodes),
        options=Options(queue=queue),
        pods=PodSettings(namespace="train"),
        minimum=None,
        findings=Findings(where="here"),
    )


def rows(objects: dict[str, Any], queue: str = "research", **overrides: Any) -> list[tuple[str, str, str]]:
    checked = preflight_of(objects, queue, **overrides)
    queues.queue(checked, pod=POD)
    return [(row.state, row.detail, row.fix) for row in checked.findings.rows]


def problems(
    *other_rows_given: dict[str, Any], mine: dict[str, Any], denied: tuple[str, ...] = ()
) -> list[str]:
    """Return findings on the cluster queue; the positional arguments are other cluster queues."""
    objects = {
        f"{LOCAL}/research": local(),
        f"{CLUSTER}/all": mine,
        CLUSTER: {"items": [mine, *other_rows_given]},
    }
    first, *further_rows = rows(objects, denied=denied)
    assert first[:2] == ("ok", "research, of cluster queue all")
    return [f"{state}: {detail}" for state, detail, _ in further_rows]


def test_a_missing_queue_is_reported_with_existing_queues_or_the_command_that_lists_them() -> None:
    [(state, detail, fix)] = rows({LOCAL: {"items": [local()]}}, "gpus")
    assert (state, detail) == ("no", "namespace train has no LocalQueue 'gpus'")
    assert fix == "--queue research"
    assert rows({LOCAL: {}}, "gpus")[0][2].startswith("kubectl get localqueues -n train")


@pytest.mark.parametrize(
    ("queue", "text"),
    [
        (local(spec={"stopPolicy": "Hold"}), "accepts no jobs now: the queue is stopped"),
        (
            local(status={"conditions": [{"type": "Active", "status": "False", "message": "no flavor"}]}),
            "accepts no jobs now: no flavor",
        ),
    ],
)
def test_a_stopped_or_inactive_queue_is_reported(queue: dict[str, Any], text: str) -> None:
    queue_rows = rows({f"{LOCAL}/research": queue, f"{CLUSTER}/all": cluster({"nominalQuota": "16"})})
    assert [(state, detail) for state, detail, _ in queue_rows] == [("unknown", f"research {text}")]


def test_a_queue_without_its_cluster_queue_or_without_quotas_admits_nothing() -> None:
    queue_rows = rows({f"{LOCAL}/research": local()})
    assert queue_rows[1][:2] == ("unknown", "ClusterQueue 'all' does not exist: no job is admitted")
    without = cluster({"nominalQuota": "16"})
    without["spec"]["resourceGroups"][0]["coveredResources"].remove("memory")
    assert problems(mine=without) == ["no: ClusterQueue all has no quota of memory"]


LENDS = f", with what cohort everybody lends: {NEVER}"


@pytest.mark.parametrize(
    ("mine", "cohort_quota", "problem"),
    [
        ([{"nominalQuota": "16"}], None, None),
        (
            [{"nominalQuota": "15"}],
            None,
            f"no: ClusterQueue all: flavor h100-0 has 15 of 16 nvidia.com/gpu: {NEVER}",
        ),
        ([{"nominalQuota": "0"}, {"nominalQuota": "16"}], None, None),
        (
            [{"nominalQuota": "8"}, {"nominalQuota": "8"}],
            None,
            "unknown: ClusterQueue all: flavor h100-0 has 8 of 16 nvidia.com/gpu; flavor h100-1 has 8 of 16 "
            "nvidia.com/gpu: the run may have to be split between flavors",
        ),
        ([{"nominalQuota": "0"}], {"nominalQuota": "16"}, None),
        (
            [{"nominalQuota": "0"}],
            {"nominalQuota": "16", "lendingLimit": "8"},
            f"no: ClusterQueue all: flavor h100-0 has 8 of 16 nvidia.com/gpu{LENDS}",
        ),
        (
            [{"nominalQuota": "0", "borrowingLimit": "4"}],
            {"nominalQuota": "16"},
            f"no: ClusterQueue all: flavor h100-0 has 4 of 16 nvidia.com/gpu{LENDS}",
        ),
    ],
)
def test_quotas_that_can_never_admit_the_run_are_refused(
    mine: list[dict[str, str]], cohort_quota: dict[str, str] | None, problem: str | None
) -> None:
    cohort = {} if cohort_quota is None else {"cohort": "everybody"}
    lenders = [] if cohort_quota is None else [cluster(cohort_quota, name="others", **cohort)]
    lenders.append(cluster({"nominalQuota": "99"}, name="elsewhere", cohort="another"))
    assert problems(*lenders, mine=cluster(*mine, **cohort)) == ([problem] if problem else [])


def test_borrowing_is_unlimited_if_the_cohort_is_unreadable_or_has_its_own_quotas() -> None:
    mine = cluster({"nominalQuota": "0"}, cohort="everybody")
    assert problems(mine=mine) != []
    assert problems(mine=mine, denied=(CLUSTER,)) == []
    cohort = {f"{VERSION}/cohorts/everybody": {"spec": {"parentName": "company"}}}
    objects = {f"{LOCAL}/research": local(), f"{CLUSTER}/all": mine, CLUSTER: {"items": [mine]}, **cohort}
    assert [state for state, *_ in rows(objects)] == ["ok"]


def test_nodes_are_kept_together_at_the_lowest_topology_level_of_all_flavors() -> None:
    levels = [{"nodeLabel": label} for label in ("cloud/block", "cloud/rack", "kubernetes.io/hostname")]
    objects = {
        f"{LOCAL}/research": local(),
        f"{CLUSTER}/all": cluster({"nominalQuota": "16"}),
        f"{VERSION}/resourceflavors/h100-0": {"spec": {"topologyName": "tree"}},
        f"{VERSION}/topologies/tree": {"spec": {"levels": levels}},
    }
    assert queues.near(preflight_of(objects)) == "cloud/rack"
    assert queues.near(preflight_of(objects, nodes=1)) is None
    objects[f"{CLUSTER}/all"] = cluster({"nominalQuota": "16"}, {"nominalQuota": "16"})
    assert queues.near(preflight_of(objects)) is None, "a flavor without a topology"
