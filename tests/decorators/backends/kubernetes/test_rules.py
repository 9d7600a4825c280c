"""What a namespace refuses, by a real API server: quotas, limits, security, networks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from decorators.backends.options import Options
from tests.decorators.backends.kubernetes.conftest import TWO, Asker, rows_of
from tests.lab.control_plane import ControlPlane

pytestmark = pytest.mark.slow


def test_a_priority_class_must_be_there_and_has_quotas_of_its_own(
    ask: Asker, control_plane: ControlPlane, namespace: str, nodes: Callable[..., None]
) -> None:
    nodes("h100-a", "h100-b")
    control_plane.kubectl("create", "priorityclass", "research", "--value=7")
    try:
        asked = Options(priority_class="resaerch")
        [(state, found, fix)] = rows_of(ask(options=asked)[0], "priority class")
        assert (state, fix.partition(" ")[0]) == ("no", "Name")
        assert found.startswith("'resaerch' does not exist; the cluster has ")
        assert "research" in found
        control_plane.apply(_quota_of_class("research", namespace))
        rows = rows_of(ask(options=Options(priority_class="research"))[0], "priority class")
        assert rows == [("ok", "research", "")]
        [(state, found, _)] = rows_of(ask(options=Options(priority_class="research"))[0], "quota")
        assert (state, found) == ("no", "by-class allows 8 requests.nvidia.com/gpu; 16 needed")
        other = ask()[0]
        assert rows_of(other, "quota") == rows_of(other, "priority class") == []
        in_patch = Options(pod_template={"spec": {"priorityClassName": "nowhere"}})
        assert ask(options=in_patch)[0].state("priority class") == "no"
    finally:
        control_plane.kubectl("delete", "priorityclass", "research")


def _quota_of_class(name: str, namespace: str) -> dict[str, Any]:
    demand = {"scopeName": "PriorityClass", "operator": "In", "values": [name]}
    hard = {"requests.nvidia.com/gpu": "8"}
    return {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "by-class", "namespace": namespace},
        "spec": {"hard": hard, "scopeSelector": {"matchExpressions": [demand]}},
    }


def test_quotas_of_disk_objects_limits_and_other_resources_are_refused_too(
    ask: Asker, control_plane: ControlPlane, namespace: str, nodes: Callable[..., None]
) -> None:
    nodes("h100-a", "h100-b")
    hard = {
        "requests.ephemeral-storage": "900Gi",
        "requests.vpc.amazonaws.com/efa": "32",
        "count/jobs.batch": "1",
        "count/jobsets.jobset.x-k8s.io": "1",
        "limits.memory": "100Gi",
    }
    listed = ",".join(f"{name}={value}" for name, value in hard.items())
    control_plane.kubectl("create", "quota", "few", f"--hard={listed}", "-n", namespace)
    refused = {found: fix for state, found, fix in rows_of(ask()[0], "quota") if state == "no"}
    disk = round(2 * TWO.disk_mib / 1024)
    assert f"few allows 900Gi requests.ephemeral-storage; {disk}Gi needed" in refused
    assert "few allows 32 requests.vpc.amazonaws.com/efa; 64 needed" in refused
    assert "few allows 1 count/jobs.batch; 2 needed" in refused
    without = "few has limits.memory, so it rejects pods without this limit"
    assert refused[without].endswith("--with kubernetes:qos=Guaranteed")
    assert len(refused) == 4
    guaranteed = str(rows_of(ask(guaranteed=True)[0], "quota"))
    assert "few allows 100Gi limits.memory; " in guaranteed
    assert without not in guaranteed


def test_the_rules_of_a_namespace_that_would_refuse_the_pods_or_cut_them_off(
    ask: Asker, control_plane: ControlPlane, namespace: str, nodes: Callable[..., None]
) -> None:
    nodes("h100-a", "h100-b")
    checks = ("limit range", "pod security", "network policy")
    assert [rows_of(ask()[0], check) for check in checks] == [[], [], []]
    limits = {"type": "Container", "max": {"cpu": "16"}, "default": {"memory": "8Gi"}, "min": {"cpu": "2"}}
    control_plane.apply(
        {
            "apiVersion": "v1",
            "kind": "LimitRange",
            "metadata": {"name": "small", "namespace": namespace},
            "spec": {"limits": [{**limits, "defaultRequest": {"cpu": "2", "memory": "1Gi"}}]},
        },
        _network_policy(namespace, "deny", {}),
    )
    control_plane.kubectl("label", "namespace", namespace, "pod-security.kubernetes.io/enforce=restricted")
    findings = ask()[0]
    limited = {found: fix for state, found, fix in rows_of(findings, "limit range") if state == "no"}
    assert f"small allows a container 16 cpu; {TWO.cpu} cpu needed" in limited
    (memory,) = [found for found in limited if "memory" in found]
    assert memory.startswith("small gives containers a limit of 8Gi memory, below the ")
    assert limited[memory].endswith("--with kubernetes:qos=Guaranteed")
    [(state, _, fix)] = rows_of(findings, "pod security")
    assert (state, "seccomp_profile" in fix) == ("no", True)
    [(state, _, fix)] = rows_of(findings, "network policy")
    assert (state, fix) == ("unknown", "kubectl apply -k infra/kubernetes/components/network-policy")
    # with what the fixes say
    control_plane.apply(_network_policy(namespace, "open", {"ingress": [{"from": [{"podSelector": {}}]}]}))
    mended = ask(guaranteed=True, restricted=True)[0]
    assert rows_of(mended, "pod security") == rows_of(mended, "network policy") == []
    assert "memory" not in str(rows_of(mended, "limit range"))
    one = ask(asks=dataclasses.replace(TWO, nodes=1))[0]
    assert rows_of(one, "network policy") == []


def _network_policy(namespace: str, name: str, rules: dict[str, Any]) -> dict[str, Any]:
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"podSelector": {}, "policyTypes": ["Ingress"], **rules},
    }
