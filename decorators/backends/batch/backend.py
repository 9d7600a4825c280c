"""AWS Batch as a :class:`decorators.backends.interface.ComputeBackend`."""

from __future__ import annotations

from decorators.backends.batch import inventory, losses, preflight, request, waiting, workarounds
from decorators.backends.interface import ComputeBackend

BATCH = ComputeBackend(
    values_for=request.values_for,
    preflight=preflight.check_queue,
    offered=preflight.check_access,
    inventory=lambda destination, _gpu: inventory.read(destination),
    wait_state=waiting.wait_state,
    remove=waiting.terminate_job,
    install=workarounds.install,
    lost=losses.lost,
)
