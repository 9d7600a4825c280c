"""Backends that steps can run on, in addition to the local machine."""

from __future__ import annotations

from decorators._metaflow import Backend
from decorators.backends.batch.backend import BATCH
from decorators.backends.interface import ComputeBackend
from decorators.backends.kubernetes.backend import KUBERNETES

BACKENDS: dict[Backend, ComputeBackend] = {"kubernetes": KUBERNETES, "batch": BATCH}
