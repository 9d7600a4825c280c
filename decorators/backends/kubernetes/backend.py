"""Kubernetes, as the other parts of this package use it."""

from __future__ import annotations

from decorators.backends.interface import ComputeBackend
from decorators.backends.kubernetes import errors, losses, offered, preflight, request, waiting
from decorators.backends.kubernetes.nodes import PodSettings
from estimator.hardware.inventory import read_cluster

KUBERNETES = ComputeBackend(
    values_for=request.values_for,
    preflight=preflight.check_cluster,
    offered=offered.offered,
    inventory=lambda destination, gpu: read_cluster(rules=PodSettings.of(destination), gpu=gpu),
    wait_state=waiting.wait_state,
    remove=waiting.remove_job,
    install=errors.install,
    lost=losses.lost,
)
