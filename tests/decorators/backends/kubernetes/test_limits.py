"""Rules of a namespace and networks of a cluster at their boundaries, from listed objects."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from decorators.backends.findings import Findings
from decorators.backends.interface import ClusterFacts, Network
from decorators.backends.kubernetes import preflight, rules
from decorators.backends.kubernetes.nodes import PodSettings, Preflight
from decorators.backends.kubernetes.offered import MULTUS_RESOURCE, networks_of
from decorators.backends.options import Options
from estimator.errors import UserError
from estimator.hardware.cluster.api import ApiRefusedError, UnreachableError
from estimator.hardware.cluster.quotas import QuotaPod
from tests.decorators.backends.kubernetes.conftest import TWO
from tests.decorators.backends.kubernetes.test_queues import Objects

OPEN, TO_PODS = {"ingress": [{"from": [{"podSelector": {}}]}]}, {"egress": [{"to": [{"podSelector": {}}]}]}
BY_ADDRESS = {"ingress": [{"from": [{"ipBlock": {"cidr": "10.0.0.0/8"}}]}]}
POD = {"cpu": 4.0, "memory": 8.0 * 2**30}


class Lists:
    """An API server that returns these items for every list."""

    def __init__(self, *items: Any) -> None:
        self.items = items

    def get(self, *_: Any, **__: Any) -> Any:
        return {"items": list(self.items)}


def preflight_of(*items: Any, nodes: int = 2, **pods: Any) -> Preflight:
    return Preflight(
        api=Lists(*items),  # type: ignore[arg-type]
        request=dataclasses.replace(TWO, nodes=nodes),
        options=Options(),
        pods=PodSettings(**pods),
        minimum=None,
        findings=Findings(where="here"),
    )


def rule_rows(judge: Any, *specs: Any, **values: Any) -> list[tuple[str, str]]:
    """Return state and text of each row of a rule for objects with these specs."""
    checked = preflight_of(*({"metadata": {"name": "own"}, "spec": spec} for spec in specs), **values)
    judge(checked, pod=POD)
    return [(row.state, row.detail) for row in checked.findings.rows]


@pytest.mark.parametrize(
    ("policies", "closed"),
    [
        ([], ()),
        ([{}], ("ingress",)),
        ([{"policyTypes": ["Egress"]}], ("egress",)),
        ([{"policyTypes": ["Ingress", "Egress"]}], ("ingress", "egress")),
        ([{"podSelector": {"matchLabels": {"app": "web"}}}], ()),
        ([{}, OPEN], ()),
        ([BY_ADDRESS], ("ingress",)),
        ([{"ingress": [{"from": [{"podSelector": {}}], "ports": [{"port": 22}]}]}], ("ingress",)),
        ([{"ingress": [{}]}], ()),
        ([{**OPEN, "egress": [{"to": [{"ipBlock": {}}]}]}], ("egress",)),
        ([{**OPEN, **TO_PODS}], ()),
    ],
)
def test_network_policies_block_a_direction_without_a_rule_for_pods(
    policies: list[Any], closed: tuple[str, ...]
) -> None:
    rows = rule_rows(rules.network_policy, *policies)
    assert [state for state, _ in rows] == ["unknown"] * bool(closed)
    assert [way for way in ("ingress", "egress") if way in str(rows)] == list(closed)
    assert rule_rows(rules.network_policy, *policies, nodes=1) == []


@pytest.mark.parametrize(
    ("limits", "guaranteed", "refused"),
    [
        ({"max": {"cpu": "4"}, "min": {"cpu": "4"}, "default": {"cpu": "4"}}, False, 0),
        ({"max": {"cpu": "3999m"}}, False, 1),
        ({"min": {"cpu": "4001m"}}, False, 1),
        ({"default": {"cpu": "3", "memory": "7Gi"}}, False, 2),
        ({"default": {"cpu": "3"}}, True, 0),
        ({"type": "PersistentVolumeClaim", "max": {"cpu": "1"}}, False, 0),
    ],
)
def test_a_limit_range_refuses_only_requests_outside_its_bounds(
    limits: dict[str, Any], guaranteed: bool, refused: int
) -> None:
    spec = {"limits": [{"type": "Container", **limits}]}
    assert [state for state, _ in rule_rows(rules.limit_range, spec, guaranteed=guaranteed)] == [
        "no"
    ] * refused


@pytest.mark.parametrize(
    ("hard", "used", "nodes", "states"),
    [
        ({"requests.cpu": "8"}, "0", 2, []),
        ({"requests.cpu": "8"}, "1", 2, ["unknown"]),
        ({"requests.cpu": "7"}, "0", 2, ["no"]),
        ({"cpu": "7"}, "0", 2, ["no"]),
        ({"requests.memory": "15Gi"}, "0", 2, ["no"]),
        ({"count/jobs.batch": "1"}, "0", 2, ["no"]),
        ({"count/jobsets.jobset.x-k8s.io": "0"}, "0", 2, ["no"]),
        ({"requests.nvidia.com/gpu": "0"}, "0", 2, []),
        ({"pods": "1"}, "0", 2, ["no"]),
        ({"services": "0"}, "0", 1, []),
        ({"services": "0"}, "0", 2, ["no"]),
    ],
)
def test_a_used_up_quota_makes_a_run_wait_and_a_request_above_it_is_refused(
    hard: dict[str, str], used: str, nodes: int, states: list[str]
) -> None:
    (name,) = hard
    item = {"metadata": {"name": "q"}, "spec": {"hard": hard}, "status": {"hard": hard, "used": {name: used}}}
    checked = preflight_of(item, nodes=nodes)
    rules.quota(checked, pod=POD)
    assert [row.state for row in checked.findings.rows] == states


def test_a_pod_requests_each_resource_that_is_not_zero() -> None:
    pod = rules.amounts(preflight_of(), ClusterFacts())
    assert (pod["cpu"], pod["nvidia.com/gpu"]) == (TWO.cpu, TWO.gpus_per_node)
    assert pod["memory"] == pytest.approx(TWO.memory_mib * 2**20, rel=1e-3)
    assert all(pod.values())


def test_networks_with_a_resource_are_found_in_the_own_and_the_default_namespace() -> None:
    def network(name: str, resource: str, plugin: str = "sriov") -> Any:
        config = {"plugins": [{"type": plugin, "ipam": {"type": "whereabouts"}}]}
        return {
            "metadata": {"name": name, "annotations": {MULTUS_RESOURCE: resource}},
            "spec": {"config": json.dumps(config)},
        }

    namespaces = {
        "ns": [network("rail", "nvidia.com/rdma"), {"metadata": {"name": "plain"}}],
        "default": [network("rail", "nvidia.com/rdma"), network("ib", "nvidia.com/ib", "ib-sriov")],
    }
    assert networks_of(lambda path: {"items": namespaces[path.split("/")[5]]}, "ns") == (
        Network(name="rail", resource="nvidia.com/rdma", plugin="sriov"),
        Network(name="default/ib", resource="nvidia.com/ib", plugin="ib-sriov"),
    )


def test_the_state_of_a_check_is_that_of_its_worst_row() -> None:
    findings = Findings(where="here")
    findings.ok("nodes", "two")
    findings.no("zones", "none")
    findings.unknown("nodes", "not told")
    assert [findings.state(check) for check in ("nodes", "zones", "quota")] == ["unknown", "no", None]


class Login:
    """An API server whose user lacks these rights."""

    def __init__(self, *denied: str) -> None:
        self.denied = denied

    def may(self, verb: str, resource: str, **namespaces: str) -> bool:
        group = {"jobs": "batch", "jobsets": "jobset.x-k8s.io"}.get(resource, "")
        assert namespaces == {"group": group, "namespace": "train"}
        return f"{verb} {resource}" not in self.denied


@pytest.mark.parametrize(
    ("denied", "nodes", "rows"),
    [
        ((), 2, [("ok", "may create jobsets")]),
        (("create jobs",), 2, [("ok", "may create jobsets")]),
        (("create jobs",), 1, [("no", "this login may not create jobs in train")]),
        (("list pods", "delete jobsets"), 2, [("no", "this login may not list pods in train")]),
        (
            ("delete jobsets",),
            2,
            [("unknown", "stopped run will not be removed"), ("ok", "may create jobsets")],
        ),
        (("patch jobs",), 1, [("unknown", "stopped run will not be removed"), ("ok", "may create jobs")]),
        (("list events",), 1, [("unknown", "reasons for waiting are not shown"), ("ok", "may create jobs")]),
    ],
)
def test_missing_rights_of_a_run_fail_the_preflight_and_others_are_reported(
    denied: tuple[str, ...], nodes: int, rows: list[tuple[str, str]]
) -> None:
    checked = dataclasses.replace(preflight_of(nodes=nodes, namespace="train"), api=Login(*denied))
    preflight._permission(checked)
    found = [(row.state, row.detail) for row in checked.findings.rows]
    assert [state for state, _ in found] == [state for state, _ in rows]
    assert all(text in detail for (_, text), (_, detail) in zip(rows, found, strict=True))


class Refusing:
    """An API server that answers every request with an error."""

    server = "lab (https://127.0.0.1:9)"

    def __init__(self, error: Exception) -> None:
        self.error = error

    def get(self, *_: Any) -> Any:
        raise self.error


@pytest.mark.parametrize(
    ("error", "problem"),
    [
        (UnreachableError("refused"), "cannot be reached"),
        (ApiRefusedError(401, ""), "does not accept this login"),
        (ApiRefusedError(403, "no"), None),
    ],
)
def test_a_rejected_login_ends_the_preflight_and_a_denied_listing_does_not(
    error: Exception, problem: str | None
) -> None:
    checked = dataclasses.replace(preflight_of(), api=Refusing(error))
    if problem is not None:
        with pytest.raises(UserError, match=problem):
            preflight.access(checked)
        return
    preflight.access(checked)
    assert checked.findings.state("access") == "unknown"


@pytest.mark.parametrize(
    ("limit_range", "guaranteed", "problem"),
    [
        ({}, False, "q has limits.memory, so it rejects pods without this limit"),
        ({}, True, "q allows 15Gi limits.memory; 16Gi needed"),
        ({"default": {"memory": "7Gi"}}, False, None),
        ({"max": {"memory": "8Gi"}}, False, "q allows 15Gi limits.memory; 16Gi needed"),
    ],
)
def test_a_quota_on_limits_counts_the_limit_of_the_pod_or_else_of_the_limit_range(
    limit_range: dict[str, Any], guaranteed: bool, problem: str | None
) -> None:
    core = "/api/v1/namespaces/train"
    hard = {"limits.memory": "15Gi"}
    quota = {"metadata": {"name": "q"}, "spec": {"hard": hard}, "status": {"hard": hard, "used": {}}}
    spec = {"limits": [{"type": "Container", **limit_range}]}
    api = Objects(
        {
            f"{core}/resourcequotas": {"items": [quota]},
            f"{core}/limitranges": {"items": [{"metadata": {"name": "own"}, "spec": spec}]},
        }
    )
    checked = dataclasses.replace(preflight_of(namespace="train", guaranteed=guaranteed), api=api)
    rules.quota(checked, pod=POD)
    assert [row.detail for row in checked.findings.rows] == ([problem] if problem else [])


@pytest.mark.parametrize(
    ("level", "restricted", "states"),
    [("restricted", False, ["no"]), ("restricted", True, []), ("baseline", False, []), (None, False, [])],
)
def test_a_restricted_namespace_requires_a_security_context(
    level: str | None, restricted: bool, states: list[str]
) -> None:
    labels = {"pod-security.kubernetes.io/enforce": level} if level else {}
    api = Objects({"/api/v1/namespaces/train": {"metadata": {"labels": labels}}})
    checked = dataclasses.replace(preflight_of(namespace="train", restricted=restricted), api=api)
    rules.pod_security(checked, pod=POD)
    assert [row.state for row in checked.findings.rows] == states


@pytest.mark.parametrize(("name", "states"), [("research", ["ok"]), ("resaerch", ["no"]), (None, [])])
def test_the_priority_class_must_exist(name: str | None, states: list[str]) -> None:
    item = {"metadata": {"name": "research"}, "value": 7}
    checked = preflight_of(item, quota_pod=QuotaPod(priority_class=name))
    rules.priority_class(checked, pod=POD)
    assert [row.state for row in checked.findings.rows] == states
    if states == ["no"]:
        assert checked.findings.rows[0].detail == "'resaerch' does not exist; the cluster has research"
