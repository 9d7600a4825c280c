"""Kubernetes, as the other parts of this package use it."""

from __future__ import annotations

from decorators.backends.interface import ComputeBackend
from decorators.backends.kubernetes import errors, inventory, losses, offered, preflight, request, waiting

KUBERNETES = ComputeBackend(
    values_for=request.values_for,
    preflight=preflight.check_cluster,
    offered=offered.offered,
    inventory=inventory.read,
    wait_state=waiting.wait_state,
    remove=waiting.remove_job,
    install=errors.install,
    lost=losses.lost,
)
