"""Affinity of pods: separate nodes close to each other."""

from __future__ import annotations

import kubernetes_validate

from decorators.backends.kubernetes.affinity import affinity_of


def test_pods_of_one_jobset_prefer_separate_nearby_nodes_without_requiring_them() -> None:
    affinity = affinity_of("t-1")
    pod = {"affinity": affinity, "containers": [{"name": "c", "image": "i"}]}
    manifest = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": pod}
    kubernetes_validate.validate(manifest, "1.32", strict=True)
    assert "requiredDuringScheduling" not in str(affinity)
    weights = {
        term["podAffinityTerm"]["topologyKey"]: (kind, term["weight"])
        for kind, terms in affinity.items()
        for term in terms["preferredDuringSchedulingIgnoredDuringExecution"]
    }
    assert weights.pop("kubernetes.io/hostname") == ("podAntiAffinity", 100)
    near, far = "topology.k8s.aws/network-node-layer-3", "topology.k8s.aws/network-node-layer-1"
    assert weights[near] > weights[far]
    assert {kind for kind, _ in weights.values()} == {"podAffinity"}
    assert all(1 <= weight <= 100 for _, weight in weights.values())
