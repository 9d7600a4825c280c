"""Quotas with scopes that count the pods of a run, compared with a real API server."""

from __future__ import annotations

from typing import Any

import pytest

from decorators.backends.kubernetes.scopes import quota_pod
from decorators.backends.options import Options
from decorators.backends.strategic_merge import merge
from estimator.hardware.cluster.quotas import QuotaPod, read_quotas
from tests.lab.api import ApiError, Json
from tests.lab.control_plane import ControlPlane, wait_for

FOREIGN = {"topologyKey": "zone", "namespaces": ["other"]}


def _patched(**spec: Any) -> Options:
    return Options(pod_template={"spec": spec})


def test_the_pod_patch_decides_which_quota_scopes_apply() -> None:
    assert quota_pod(Options()) == QuotaPod()
    assert quota_pod(_patched(activeDeadlineSeconds=None)) == QuotaPod(has_deadline=False)
    assert quota_pod(_patched(priorityClassName="high")) == QuotaPod(priority_class="high")
    assert quota_pod(Options(priority_class="high")) == QuotaPod(priority_class="high")
    both = {"spec": {"priorityClassName": "low"}}  # the patch is merged in last
    assert quota_pod(Options(priority_class="high", pod_template=both)).priority_class == "low"
    rule = "requiredDuringSchedulingIgnoredDuringExecution"
    near = _patched(affinity={"podAffinity": {rule: [FOREIGN]}})
    assert quota_pod(near) == QuotaPod(across_namespaces=True)
    labeled = {"topologyKey": "zone", "namespaceSelector": {}}
    assert quota_pod(_patched(affinity={"podAntiAffinity": {rule: [labeled]}})).across_namespaces
    affinity = {"topologyKey": "zone", "labelSelector": {"matchLabels": {"a": "b"}}}
    assert not quota_pod(_patched(affinity={"podAffinity": {rule: [affinity]}})).across_namespaces


def _demand(operator: str, *values: str) -> Json:
    return {
        "scopeName": "PriorityClass",
        "operator": operator,
        **({"values": list(values)} if values else {}),
    }


SCOPED: dict[str, Json] = {
    **{name: {"scopes": [name]} for name in ("Terminating", "NotTerminating", "BestEffort", "NotBestEffort")},
    "two": {"scopes": ["Terminating", "NotBestEffort"]},
    "in": {"scopeSelector": {"matchExpressions": [_demand("In", "scoped")]}},
    "not in": {"scopeSelector": {"matchExpressions": [_demand("NotIn", "scoped")]}},
    "exists": {"scopeSelector": {"matchExpressions": [_demand("Exists")]}},
    "none": {"scopeSelector": {"matchExpressions": [_demand("DoesNotExist")]}},
}
PODS = {
    "plain": Options(),
    "of a class": Options(priority_class="scoped"),
    "without a deadline": _patched(activeDeadlineSeconds=None),
}


@pytest.fixture(scope="module")
def namespace(control_plane: ControlPlane) -> str:
    path = "/apis/scheduling.k8s.io/v1/priorityclasses"
    control_plane.api().create(path, {"metadata": {"name": "scoped"}, "value": 7})
    return control_plane.namespace("scopes")


@pytest.mark.slow
@pytest.mark.parametrize(
    "scoped",
    [
        pytest.param(scoped, id=name, marks=() if name in ("Terminating", "in") else pytest.mark.nightly)
        for name, scoped in SCOPED.items()
    ],
)
def test_quota_scopes_match_a_pod_exactly_if_the_server_counts_it(
    control_plane: ControlPlane, namespace: str, scoped: Json
) -> None:
    api, path = control_plane.api(), f"/api/v1/namespaces/{namespace}/resourcequotas"
    api.create(path, {"metadata": {"name": "none-left"}, "spec": {"hard": {"pods": "0"}, **scoped}})
    try:
        wait_for(lambda: api.get(f"{path}/none-left").get("status", {}).get("hard"), 60, "it counts")
        counted = {
            name: bool(read_quotas(api.get, namespace, quota_pod(pod_fields)))
            for name, pod_fields in PODS.items()
        }
        wait_for(
            lambda: counted == _refused(control_plane, namespace), 30, f"the server says {counted}", every=1
        )
    finally:
        api.delete(f"{path}/none-left")


def _refused(control_plane: ControlPlane, namespace: str) -> dict[str, bool]:
    """Return which of the pods the server refuses under that quota; no pod is created."""
    resources = {"requests": {"cpu": "1", "memory": "1Gi"}}
    main = {"name": "main", "image": "i", "resources": resources}
    spec = {"activeDeadlineSeconds": 60, "containers": [main]}
    refusals = {}
    for name, pod_fields in PODS.items():
        template = {"spec": {**spec, "priorityClassName": pod_fields.priority_class}}
        answer = _answer(control_plane, namespace, merge(template, dict(pod_fields.pod_template or {})))
        refusals[name] = "exceeded quota: none-left" in answer
    return refusals


def _answer(control_plane: ControlPlane, namespace: str, template: Json) -> str:
    pod = {"metadata": {"generateName": "p-"}, **template}
    try:
        return str(control_plane.api().create(f"/api/v1/namespaces/{namespace}/pods?dryRun=All", pod))
    except ApiError as error:
        return str(error)
