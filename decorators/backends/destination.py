"""Where a run's training step goes, for whoever plans it: what its cluster or queue has and could get."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from decorators import _metaflow
from decorators._metaflow import Backend
from decorators.backends.interface import Destination
from decorators.backends.registry import BACKENDS
from estimator.hardware.cluster import Cluster

_current: ContextVar[Destination | None] = ContextVar("destination", default=None)


@contextmanager
def going_to(destination: Destination) -> Iterator[None]:
    """Inside this context a plan is made for a step that goes there."""
    token = _current.set(destination)
    try:
        yield
    finally:
        _current.reset(token)


def read_cluster(backend: Backend, gpu: str | None = None) -> Cluster:
    """Ask the backend; outside of :func:`going_to`, where Metaflow's configuration leads.

    ``gpu``: the GPU that the user names, for nodes without a label of theirs.
    Raises UserError where it can't be asked.
    """
    destination = _current.get()
    if destination is None or destination.backend != backend:
        destination = Destination(backend=backend, configured=_metaflow.configured_target(backend))
    return BACKENDS[backend].inventory(destination, gpu)
