"""Affinity of the pods of a multi-node step: on different nodes, close to each other."""

from __future__ import annotations

from typing import Any

from decorators.backends import tables

JOBSET_LABEL = "jobset.sigs.k8s.io/jobset-name"
HOSTNAME_LABEL = "kubernetes.io/hostname"
_APART = 100  # the highest weight that Kubernetes takes


def affinity_of(jobset: str) -> dict[str, Any]:
    """The ``affinity`` of each pod of a JobSet, in the words of the Kubernetes API.

    A preference in all its parts: where there is no room it holds no pod back, and labels that a cluster
    doesn't have count for nothing.
    """
    near = [_term(jobset, level.label, level.weight) for level in tables.topology()]
    return {
        "podAntiAffinity": {_PREFERRED: [_term(jobset, HOSTNAME_LABEL, _APART)]},
        "podAffinity": {_PREFERRED: near},
    }


_PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"


def _term(jobset: str, label: str, weight: int) -> dict[str, Any]:
    return {
        "weight": weight,
        "podAffinityTerm": {"labelSelector": {"matchLabels": {JOBSET_LABEL: jobset}}, "topologyKey": label},
    }
