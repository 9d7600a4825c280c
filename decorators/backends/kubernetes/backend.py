"""Kubernetes, as the other parts of this package use it."""

from __future__ import annotations

from decorators.backends.interface import ComputeBackend
from decorators.backends.kubernetes import errors, inventory, losses, preflight, request, waiting

KUBERNETES = ComputeBackend(
    values_for=request.values_for,
    lowered=request.lowered,
    preflight=preflight.check_cluster,
    preflight_beside=preflight.check_cluster_beside,
    inventory=inventory.read,
    wait_state=waiting.wait_state,
    remove=waiting.remove_job,
    install=errors.install,
    observe=losses.look,
    lost=losses.lost,
    has_ended=losses.has_ended,
)
