"""A namespace's quotas, and which of them count a run's pods. tests/decorators asks a real API server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from estimator.hardware.cluster.quotas import Quota, QuotaPod, read_quotas

Get = Callable[[str], dict[str, Any]]


def _server(*quotas: dict[str, Any], classes: tuple[dict[str, Any], ...] | None = None) -> Get:
    """Answers for one namespace; without ``classes`` nobody may ask for the priority classes."""

    def get(path: str) -> dict[str, Any]:
        if path == "/api/v1/namespaces/research/resourcequotas":
            return {"items": list(quotas)}
        assert (path, classes is None) == ("/apis/scheduling.k8s.io/v1/priorityclasses", False)
        return {"items": list(classes or ())}

    return get


def _quota(hard: dict[str, str] | None = None, **spec: Any) -> dict[str, Any]:
    return {"metadata": {"name": "team"}, "spec": {"hard": hard or {"pods": "0"}, **spec}}


def _by_class(operator: str, *values: str) -> dict[str, Any]:
    named = {"values": list(values)} if values else {}
    demand = {"scopeName": "PriorityClass", "operator": operator, **named}
    return _quota(scopeSelector={"matchExpressions": [demand]})


def test_a_quota_is_read_with_limit_and_usage() -> None:
    hard = {"requests.nvidia.com/gpu": "8", "memory": "1Ti", "pods": "20"}
    quota = {"metadata": {"name": "team"}, "status": {"hard": hard, "used": {"memory": "256Gi"}}}
    found = {line.resource: line for line in read_quotas(_server(quota), "research", QuotaPod())}
    assert found["nvidia.com/gpu"] == Quota(name="team", key="requests.nvidia.com/gpu", limit=8, used=0)
    assert found["memory"].amount(found["memory"].remaining) == "768Gi"


@pytest.mark.parametrize(
    ("scopes", "counted"),
    [
        ((), True),
        (("Terminating",), True),
        (("NotTerminating",), False),
        (("NotBestEffort",), True),
        (("BestEffort",), False),
        (("Terminating", "BestEffort"), False),
        (("CrossNamespacePodAffinity",), False),
    ],
)
def test_a_quota_counts_a_pod_that_is_within_all_its_scopes(scopes: tuple[str, ...], counted: bool) -> None:
    short = _quota(scopes=list(scopes))
    demands = [{"scopeName": name, "operator": "Exists"} for name in scopes]
    for quota in (short, _quota(scopeSelector={"matchExpressions": demands})):
        assert bool(read_quotas(_server(quota), "research", QuotaPod())) is counted


def test_deadline_and_cross_namespace_affinity_decide_the_scopes_of_a_pod() -> None:
    pod = QuotaPod(has_deadline=False, across_namespaces=True)
    names = ("Terminating", "NotTerminating", "CrossNamespacePodAffinity")
    counted = [name for name in names if read_quotas(_server(_quota(scopes=[name])), "research", pod)]
    assert counted == ["NotTerminating", "CrossNamespacePodAffinity"]


@pytest.mark.parametrize(
    ("operator", "values", "counted"),
    [
        ("In", ("high", "low"), {"low"}),
        ("NotIn", ("low",), {"", "other"}),
        ("Exists", (), {"low", "other"}),
        ("DoesNotExist", (), {""}),
    ],
)
def test_a_quota_by_priority_class_counts_the_pods_of_that_class(
    operator: str, values: tuple[str, ...], counted: set[str]
) -> None:
    get = _server(_by_class(operator, *values))
    named = ("", "low", "other")
    assert {each for each in named if read_quotas(get, "research", QuotaPod(priority_class=each))} == counted


def test_a_pod_without_a_priority_class_has_the_default_one_of_the_cluster() -> None:
    usual = {"metadata": {"name": "low"}, "value": 5, "globalDefault": True}
    other = {"metadata": {"name": "high"}, "value": 9}
    for_low = _by_class("In", "low")
    assert read_quotas(_server(for_low, classes=(other, usual)), "research", QuotaPod())
    assert not read_quotas(_server(for_low, classes=(other,)), "research", QuotaPod())
    # Who may not list the classes is asked for them only where a quota goes by one
    assert read_quotas(_server(_quota(scopes=["Terminating"])), "research", QuotaPod())


def test_a_quota_with_scopes_limits_pods_and_no_other_objects() -> None:
    hard = dict.fromkeys(("count/jobs.batch", "count/pods", "services", "cpu", "pods"), "1")
    scoped = read_quotas(_server(_quota(hard, scopes=["Terminating"])), "research", QuotaPod())
    assert {line.key for line in scoped} == {"count/pods", "cpu", "pods"}
    assert len(read_quotas(_server(_quota(hard)), "research", QuotaPod())) == len(hard)
