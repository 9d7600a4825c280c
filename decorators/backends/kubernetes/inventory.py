"""What the cluster of the current context offers a run's pods."""

from __future__ import annotations

from decorators.backends.interface import Destination
from decorators.backends.kubernetes.scopes import quota_pod
from estimator.hardware.cluster import Cluster
from estimator.hardware.cluster_taints import Toleration
from estimator.hardware.inventory import PodRules, read_cluster


def read(destination: Destination) -> Cluster:
    """Ask the cluster. Raises UserError where it can't be asked."""
    values, given = destination.configured, destination.given
    selector = given["node_selector"].value if "node_selector" in given else {}
    return read_cluster(
        rules=PodRules(
            namespace=values.get("namespace") or "default",
            node_selector=tuple(selector.items()) if isinstance(selector, dict) else (),
            tolerations=tuple(Toleration.of(item) for item in values.get("tolerations") or ()),
            of_table="tolerations" not in given,
            zone=destination.options.zone,
            in_quotas=quota_pod(destination.options),
        )
    )
