"""Target of a run's training step, and the cluster inventory that the planner reads for it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from decorators import _metaflow
from decorators._metaflow import Backend
from decorators.backends.interface import Destination
from decorators.backends.registry import BACKENDS
from estimator.errors import UserError
from estimator.hardware.cluster import Cluster
from estimator.terminal import print

_current: ContextVar[Destination | None] = ContextVar("destination", default=None)


@contextmanager
def planning_for(destination: Destination) -> Iterator[None]:
    """Set the target that plans in this context are made for."""
    token = _current.set(destination)
    try:
        yield
    finally:
        _current.reset(token)


def read_cluster(backend: Backend, gpu: str | None = None) -> Cluster:
    """Read the backend's inventory, for the target of :func:`planning_for` or of Metaflow's configuration.

    ``gpu``: GPU named by the user, assumed for nodes without a GPU label. Raises UserError if the backend
    cannot be reached.
    """
    destination = _current.get()
    if destination is None or destination.backend != backend:
        destination = Destination(backend=backend, configured=_metaflow.configured_target(backend))
    return BACKENDS[backend].inventory(destination, gpu)


def find_cluster(backend: Backend, gpu: str | None = None, *, skipped: str | None = None) -> Cluster | None:
    """Read the cluster or queue of a run, and print its notes.

    Returns None on the local backend. Also returns None, with the reason on standard error, if the cluster
    cannot be queried; then plans use the machines of the catalogue. ``gpu``: GPU of Kubernetes nodes without
    a GPU label. ``skipped``: reason not to query the cluster.
    """
    if backend == "local":
        return None
    if skipped is None and _metaflow.compiles_only():
        skipped = "--only-json contacts no cluster"
    if skipped is None:
        try:
            cluster = read_cluster(backend, gpu)
        except UserError as error:
            skipped = error.problem.removesuffix(".")
        else:
            for line in cluster.notes:
                print(line, file=sys.stderr)
            return cluster
    print(f"Planned with the catalogue's machines: {skipped}.", file=sys.stderr)
    return None
