"""What the cluster of the current context offers a run's pods."""

from __future__ import annotations

from decorators.backends.interface import Destination
from decorators.backends.kubernetes.nodes import PodSettings
from estimator.hardware.cluster import Cluster
from estimator.hardware.inventory import read_cluster


def read(destination: Destination) -> Cluster:
    """Ask the cluster. Raises UserError where it can't be asked."""
    return read_cluster(rules=PodSettings.of(destination))
