"""Kubernetes, as the other parts of this package use it."""

from __future__ import annotations

from decorators.backends.interface import ComputeBackend, Destination
from decorators.backends.kubernetes import errors, losses, offered, preflight, request, waiting
from decorators.backends.kubernetes.nodes import PodSettings
from estimator.hardware.cluster import Cluster
from estimator.hardware.cluster.inventory import read_cluster


def _inventory(destination: Destination, gpu: str | None) -> Cluster:
    cluster = read_cluster(rules=PodSettings.of(destination), gpu=gpu)
    # A disk that the user has written is asked for whatever the plan needs
    return cluster.with_any_disk if "disk" in destination.given else cluster


KUBERNETES = ComputeBackend(
    values_for=request.values_for,
    preflight=preflight.check_cluster,
    offered=offered.offered,
    inventory=_inventory,
    wait_state=waiting.wait_state,
    remove=waiting.remove_job,
    install=errors.install,
    lost=losses.lost,
)
