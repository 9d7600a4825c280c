"""Parsers of text pasted into the page: a model's config.json, and the output of kubectl."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from estimator import hardware
from estimator.errors import UserError
from estimator.hardware.cluster import Cluster
from estimator.hardware.cluster.inventory import ClusterState, cluster_capacity
from estimator.hardware.cluster.nodes import node_of
from estimator.hardware.cluster.pods import PodRules, Usage, read_usage
from estimator.models import ModelSpec, hf_config
from estimator.planner_page.fields import KUBECTL
from estimator.untrusted import parse_json

_ENDED = ("Succeeded", "Failed")


def model(text: str) -> ModelSpec:
    """Parse the model of a config.json. Raises UserError for an invalid or unsupported one."""
    values = _json(text, "The pasted config.json", "Paste the whole file.")
    if not isinstance(values, dict):
        raise UserError("The pasted config.json is not a JSON object.", "Paste the whole file.")
    return hf_config.to_spec(values, "pasted config.json")


def cluster(text: str, gpu: str | None = None) -> Cluster:
    """Return the capacity of the pasted nodes, minus the pods pasted with them.

    ``gpu``: GPU of nodes without a GPU label, named by the user.

    Raises UserError for text without nodes.
    """
    content = _json(text, "The pasted nodes", f"Paste all that `{KUBECTL}` prints.")
    items = content.get("items", [content]) if isinstance(content, dict) else content
    items_of_kind: dict[str, list[Any]] = {"Node": [], "Pod": []}
    for item in items if isinstance(items, list) else []:
        if isinstance(item, dict) and item.get("kind") in items_of_kind:
            items_of_kind[item["kind"]].append(item)
    if not items_of_kind["Node"]:
        raise UserError("There are no nodes in the pasted text.", f"Paste all that `{KUBECTL}` prints.")
    unknown = ["quotas", "autoscalers"]
    if not items_of_kind["Pod"]:
        unknown.insert(0, "usage of the nodes (paste the pods too)")
    try:
        usage = _usage(items_of_kind["Pod"]) if items_of_kind["Pod"] else None
        nodes = tuple(node_of(item) for item in items_of_kind["Node"])
        state = ClusterState(context="pasted", nodes=nodes, usage=usage, unknown=tuple(unknown))
        return replace(
            cluster_capacity(state, hardware.current(), PodRules(), gpu=gpu), name="the pasted cluster"
        )
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise UserError(
            f"A pasted node or pod is incomplete: {error}.", f"Paste what `{KUBECTL}` prints."
        ) from None


def _usage(pods: Sequence[Mapping[str, Any]]) -> dict[str, Usage]:
    """Return usage by node, without finished pods."""
    running = [pod for pod in pods if (pod.get("status") or {}).get("phase") not in _ENDED]
    return read_usage(lambda _path, **_query: {"kind": "PodList", "items": running})


def _json(text: str, name: str, advice: str) -> Any:
    try:
        return parse_json(text)
    except ValueError as error:
        raise UserError(f"{name} is not JSON: {error}.", advice) from None
