"""Target of a run's training step for the planner: current and possible capacity of its cluster or queue."""

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
    Raises UserError where it cannot be asked.
    """
    destination = _current.get()
    if destination is None or destination.backend != backend:
        destination = Destination(backend=backend, configured=_metaflow.configured_target(backend))
    return BACKENDS[backend].inventory(destination, gpu)


def find_cluster(backend: Backend, gpu: str | None = None, *, skipped: str | None = None) -> Cluster | None:
    """Read the cluster or queue of a run, and print its notes.

    None on the local backend; None, with the reason on standard error, where the machines of the catalogue
    stand in for a cluster that cannot be asked. ``gpu``: GPU of Kubernetes nodes without a label of it.
    ``skipped``: the reason not to ask at all.
    """
    if backend == "local":
        return None
    if skipped is None and _metaflow.compiles_only():
        skipped = "--only-json asks no cluster"
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
