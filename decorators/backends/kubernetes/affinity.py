"""Affinity of the pods of a multi-node step: on different nodes that are close to each other."""

from __future__ import annotations

from typing import Any

from decorators.backends import tables

JOBSET_LABEL = "jobset.sigs.k8s.io/jobset-name"
HOSTNAME_LABEL = "kubernetes.io/hostname"
_APART = 100  # maximum weight in Kubernetes


def affinity_of(jobset: str) -> dict[str, Any]:
    """Return the ``affinity`` of each pod of a JobSet, as in the Kubernetes API.

    All rules are preferences: they never keep a pod from being scheduled, and labels that a cluster lacks
    have no effect.
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
