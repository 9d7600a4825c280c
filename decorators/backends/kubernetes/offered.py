"""Devices and Multus networks that a cluster offers for GPU traffic between nodes."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache

from decorators._metaflow import compiles_only, print_line
from decorators.backends.interface import ClusterFacts, Network, StepRequest
from decorators.backends.kubernetes.fabric import describe_unused, fabric_of, unused_devices
from estimator.hardware.cluster.api import (
    ApiRefusedError,
    Clock,
    ClusterApi,
    Json,
    UnreachableError,
    api_error,
    get_or_none,
)
from estimator.hardware.cluster.nodes import GPUS, Node, read_nodes

# annotation of a network: the resource that its pods request
MULTUS_RESOURCE = "k8s.v1.cni.cncf.io/resourceName"
SHARED_NAMESPACE = "default"
# The first plugin of a network's CNI configuration, which is JSON in a string
_PLUGIN = re.compile(r'"type"\s*:\s*"([\w.-]+)"')
_TIMEOUT_S = 10.0


def devices_of(nodes: Sequence[Node]) -> tuple[tuple[str, int], ...]:
    """Return the extended resources that all nodes offer, each with its minimum count over the nodes."""
    names = {name for node in nodes for name in node.allocatable if "/" in name}
    counts = {name: min(int(node.allocatable.get(name, 0)) for node in nodes) for name in names}
    return tuple(sorted((name, count) for name, count in counts.items() if count))


def networks_of(get: Callable[..., Json], namespace: str) -> tuple[Network, ...]:
    """Return the Multus networks whose pods request a device: the namespace's, then those of ``default``.

    Network operators create networks in ``default`` unless configured otherwise, and Multus lets pods of all
    namespaces refer to them. Empty without Multus, or if this login may not list networks.
    """
    own = _networks_in(get, namespace)
    if namespace == SHARED_NAMESPACE:
        return own
    attached = {network.resource for network in own}
    shared = (net for net in _networks_in(get, SHARED_NAMESPACE) if net.resource not in attached)
    return (*own, *(replace(network, name=f"{SHARED_NAMESPACE}/{network.name}") for network in shared))


def _networks_in(get: Callable[..., Json], namespace: str) -> tuple[Network, ...]:
    path = f"/apis/k8s.cni.cncf.io/v1/namespaces/{namespace}/network-attachment-definitions"
    try:
        response = get_or_none(get, path) or {}
    except (ApiRefusedError, UnreachableError):
        return ()
    networks = []
    for item in response.get("items") or []:
        resource = (item["metadata"].get("annotations") or {}).get(MULTUS_RESOURCE)
        if resource:
            plugin = _PLUGIN.search(str((item.get("spec") or {}).get("config") or ""))
            networks.append(
                Network(
                    name=str(item["metadata"]["name"]),
                    resource=str(resource),
                    plugin=plugin[1] if plugin else "",
                )
            )
    return tuple(sorted(networks, key=lambda network: network.name))


def offered(step_request: StepRequest) -> ClusterFacts:
    """Return the facts for a step without a preflight, from nodes with its GPUs; empty if this login may not
    list nodes. Raises UserError if the API cannot be used.
    """
    if compiles_only():
        return ClusterFacts()
    namespace, request = str(step_request.configured.get("namespace") or "default"), step_request.request
    facts = _read_once(namespace, request.gpus_per_node)
    by_fabric = request.nodes > 1 and request.gpus_per_node and step_request.options.fabric == "auto"
    devices = unused_devices(facts) if by_fabric else ()
    if devices and fabric_of(request, step_request.options, facts) is None:
        problem, advice = describe_unused(devices)
        _report_once(f"Network: {problem}.\nTo change this, {advice}.")
    return facts


_report_once = lru_cache(maxsize=1)(print_line)


@lru_cache(maxsize=1)
def _read_once(namespace: str, gpus: int) -> ClusterFacts:
    with ClusterApi(clock=Clock(overall_s=_TIMEOUT_S)) as api:
        try:
            nodes = [
                node
                for node in read_nodes(api.get)
                if node.ready and node.allocatable.get(GPUS, 0) >= max(gpus, 1)
            ]
        except (ApiRefusedError, UnreachableError) as error:
            if isinstance(error, UnreachableError) or error.status == 401:
                raise api_error(error, api.server) from None
            return ClusterFacts()
        networks = networks_of(api.get, namespace)
    return ClusterFacts(devices=devices_of(nodes), networks=networks) if nodes else ClusterFacts()
