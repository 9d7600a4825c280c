"""Kubernetes as a :class:`decorators.backends.interface.ComputeBackend`."""

from __future__ import annotations

from decorators.backends.interface import ComputeBackend, Destination
from decorators.backends.kubernetes import errors, losses, offered, preflight, request, waiting
from decorators.backends.kubernetes.nodes import PodSettings
from estimator.hardware.cluster import Cluster
from estimator.hardware.cluster.inventory import read_cluster


def _inventory(destination: Destination, gpu: str | None) -> Cluster:
    cluster = read_cluster(rules=PodSettings.of(destination), gpu=gpu)
    # A disk size set by the user is requested regardless of the plan
    return cluster.with_any_disk if "disk" in destination.user_values else cluster


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
