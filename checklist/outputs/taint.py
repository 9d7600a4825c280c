"""Taints or labels of bad Kubernetes nodes, which keep jobs away, and their removal after recovery.

A taint repels pods that do not tolerate it. A label works the opposite way, because selectors test equality:
healthy nodes have fit=true, bad ones fit=false. Nothing is changed unless requested. The failures of a node
are stored in an annotation, and its mark is removed only after a later run clears them
(:func:`checklist.open_failures.still_open`).
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from checklist.measurements import record
from checklist.open_failures import still_open
from checklist.options import MAX_SHARE
from checklist.result import OpenFailure, Result
from estimator.errors import UserError
from estimator.hardware.cluster.api import (
    ApiRefusedError,
    Clock,
    ClusterApi,
    UnreachableError,
    api_error,
    list_all,
)
from estimator.hardware.cluster.nodes import NODES
from estimator.untrusted import parse_json

KEY = "training-checklist/unfit"  # key of the taint and the annotation
LABEL = "training-checklist/fit"
EFFECT = "NoSchedule"  # running pods are not evicted
TIMEOUT_S = 10.0
ATTEMPTS = 3  # tries per node, which others may change concurrently
RULE = 'a ClusterRole with verbs ["get", "list", "patch"] on resources ["nodes"], bound to this account'
MarkKind = Literal["taint", "label"]
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """Relevant state of one Kubernetes node."""

    name: str
    version: str
    """resourceVersion: the server rejects changes based on an older one."""
    taints: tuple[Mapping[str, Any], ...] = ()
    labels: Mapping[str, str] = dataclasses.field(default_factory=dict)
    reasons: tuple[OpenFailure, ...] = ()
    """Failures it was marked for; () for a marked node: marked by another party, so it is never changed."""

    @property
    def marked(self) -> bool:
        return self.labels.get(LABEL) == "false" or any(taint.get("key") == KEY for taint in self.taints)


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeChange:
    """Intended change of one node."""

    node: Node
    kind: Literal["mark", "unmark", "fit"]
    """"fit": label a healthy node as fit (labels only)."""
    reasons: tuple[OpenFailure, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Changes:
    """Intended changes, and omitted ones with the reason."""

    changes: tuple[NodeChange, ...] = ()
    refused: tuple[str, ...] = ()


class NodeError(UserError):
    """Failure that concerns one node only."""


class NodeChangedError(NodeError):
    """Node was changed by another party since it was read."""


class NotAllMarkedError(UserError):
    """Some nodes could not be marked. ``lines``: one for each node, including marked ones."""

    def __init__(self, lines: tuple[str, ...]) -> None:
        super().__init__("Not all nodes could be marked.", " ".join(lines))
        self.lines = lines


def check_share(most_share: float) -> None:
    """Validate the share. Raises UserError."""
    if not (math.isfinite(most_share) and 0 <= most_share <= 1):
        raise UserError(f"--most-share {most_share} must be from 0 to 1.", "0.25 is a quarter of the nodes.")


def changes(
    result: Result, nodes: tuple[Node, ...], *, method: MarkKind = "taint", most_share: float = MAX_SHARE
) -> Changes:
    """Derive the changes of the cluster's nodes from a result. Raises UserError for an invalid share.

    If more than ``most_share`` of the nodes would be marked in total, no further node is marked, because a
    common cause is more likely than that number of bad nodes.
    """
    check_share(most_share)
    problems = _failures(result)
    node_by_name = {node.name: node for node in nodes}
    refused = [
        f"{name} is no node of this cluster: it is not marked."
        for name in problems
        if name not in node_by_name
    ]
    todo = [
        change for node in nodes if (change := _change(node, result, problems.get(node.name, []), method))
    ]
    marked = {node.name for node in nodes if node.marked}
    marked |= {change.node.name for change in todo if change.kind == "mark"}
    marked -= {change.node.name for change in todo if change.kind == "unmark"}
    limit = math.floor(most_share * len(nodes))
    added = [change for change in todo if change.kind == "mark" and not change.node.marked]
    if added and len(marked) > limit:
        names = ", ".join(change.node.name for change in added)
        refused.append(
            f"{names}: not marked, as {len(marked)} of {len(nodes)} nodes would be, "
            f"more than {most_share:.0%}"
            f" ({limit}). Look for a common cause first."
        )
        todo = [change for change in todo if change not in added]
    return Changes(changes=tuple(todo), refused=tuple(refused))


def _failures(result: Result) -> dict[str, list[OpenFailure]]:
    """Return the open failures attributed to each node."""
    by_node: dict[str, list[OpenFailure]] = {}
    for item in result.open_failures():
        for name in item.nodes if item.blamed else ():
            by_node.setdefault(name, []).append(item)
    return by_node


def _change(node: Node, result: Result, failures: list[OpenFailure], method: MarkKind) -> NodeChange | None:
    """Decide the change of a node from its open failures."""
    # Earlier reasons for the mark also count until they are cleared
    started = result.measurements.started_unix
    still_failing = still_open(node.reasons, result.checks, result.profile, result.gpus, started)
    reasons = (
        *still_failing,
        *(item for item in failures if _key(item) not in {_key(old) for old in still_failing}),
    )
    if failures:
        unchanged = node.marked and {_key(item) for item in reasons} == {_key(item) for item in node.reasons}
        return None if unchanged else NodeChange(node=node, kind="mark", reasons=reasons)
    if node.marked:
        # A mark without stored reasons belongs to another party
        return NodeChange(node=node, kind="unmark") if node.reasons and not still_failing else None
    if method == "label" and node.name in result.healthy_nodes and node.labels.get(LABEL) != "true":
        return NodeChange(node=node, kind="fit")
    return None


def _key(item: OpenFailure) -> tuple[str, str]:
    return item.check, item.profile


def publish(
    result: Result,
    *,
    apply: bool = False,
    method: MarkKind = "taint",
    most_share: float = MAX_SHARE,
    context: str | None = None,
) -> tuple[str, ...]:
    """Mark and unmark nodes; return a line for each, including skipped ones. Dry run without ``apply``.

    Raises UserError if the cluster is unreachable or denies access (the message names the missing rule), and
    NotAllMarkedError if that, or unchangeable nodes, left some nodes unmarked.
    """
    cluster = Cluster(context)
    todo = changes(result, cluster.nodes(), method=method, most_share=most_share)
    if not apply:
        return (
            *todo.refused,
            *(_line(change, "would be {} ({}), but this is a dry run.", method) for change in todo.changes),
        )
    lines = list(todo.refused)
    complete = True
    for number, change in enumerate(todo.changes):
        try:
            done = _carry_out(cluster, change, result, method)
        except NodeError as error:  # noqa: PERF203 - errors are handled per node
            lines.append(f"{change.node.name}: left as it is. {error.problem} {error.advice}")
            complete = False
        except UserError as error:  # the other nodes would fail too
            if number == 0:
                raise
            names = ", ".join(change_left.node.name for change_left in todo.changes[number:])
            raise NotAllMarkedError(
                (*lines, f"{names}: left as it is. {error.problem} {error.advice}")
            ) from None
        else:
            lines += [] if done is None else [_line(done, "{} ({}).", method)]
    if not complete:
        raise NotAllMarkedError(tuple(lines))
    return tuple(lines)


def _line(change: NodeChange, text: str, method: MarkKind) -> str:
    action = {"mark": "marked as unfit", "unmark": "no longer marked", "fit": "marked as fit"}[change.kind]
    reasons = " ".join(item.title for item in change.reasons)
    return f"{change.node.name}: {text.format(action, method)} {reasons}".rstrip()


def _carry_out(cluster: Cluster, change: NodeChange, result: Result, method: MarkKind) -> NodeChange | None:
    """Change a node, read again after a conflict; return None if no change is necessary any more."""
    todo: NodeChange | None = change
    for attempt in range(1, ATTEMPTS + 1):
        if todo is None:
            break
        try:
            cluster.patch(todo, method)
            break
        except NodeChangedError:
            if attempt == ATTEMPTS:
                raise
            node = cluster.node(change.node.name)
            todo = _change(node, result, _failures(result).get(node.name, []), method)
    return todo


def check_installed() -> None:
    """Import the Kubernetes library. Raises UserError if it is missing."""
    if importlib.util.find_spec("kubernetes") is None:
        raise UserError(
            "Marking nodes needs the kubernetes library, which is not installed.",
            "pip install 'metaflow-finetune[kubernetes]'",
        )


def check(context: str | None = None, *, apply: bool = False) -> None:
    """Check in advance that nodes can be marked, without changing anything.

    Raises UserError if the cluster is unreachable or denies the permission.
    """
    cluster = Cluster(context)
    for verb in ("list", "patch") if apply else ("list",):
        cluster.check_permission(verb)


class Cluster:
    """Nodes of one Kubernetes cluster: the kubeconfig's context, or the cluster of this pod."""

    def __init__(self, context: str | None = None) -> None:
        clock = Clock(overall_s=math.inf, call_s=TIMEOUT_S)
        self._api = ClusterApi(context, purpose="Marking nodes", clock=clock)

    def nodes(self) -> tuple[Node, ...]:
        """List all nodes. Raises UserError."""
        return tuple(map(_node, self._request("list", list_all, self._api.get, *NODES)))

    def node(self, name: str) -> Node:
        """Read the current state of one node. Raises UserError."""
        return _node(self._request("get", self._api.get, f"/api/v1/nodes/{name}"))

    def patch(self, change: NodeChange, method: MarkKind) -> None:
        """Mark or unmark one node. Raises UserError, or NodeError if only this node is affected."""
        path = f"/api/v1/nodes/{change.node.name}"
        self._request("patch", self._api.patch, path, patch_of(change, method))

    def check_permission(self, verb: str) -> None:
        """Check that this account may use ``verb`` on nodes. Raises UserError if not."""
        if not self._request(verb, self._api.may, verb, "nodes"):
            raise _not_allowed(verb)

    def _request(self, verb: str, call: Callable[..., T], *values: Any) -> T:
        try:
            return call(*values)
        except ApiRefusedError as error:
            raise _refused(verb, self._api.server, error) from None
        except UnreachableError as error:
            raise api_error(error, self._api.server) from None


def patch_of(change: NodeChange, method: MarkKind) -> dict[str, Any]:
    """Build the body of the patch. Kubernetes replaces the list of taints, so other taints are included."""
    node, mark = change.node, change.kind == "mark"
    reasons = json.dumps([dataclasses.asdict(item) for item in change.reasons]) if mark else None
    metadata: dict[str, Any] = {"resourceVersion": node.version, "annotations": {KEY: reasons}}
    if method == "label" or (not mark and LABEL in node.labels):
        metadata["labels"] = {LABEL: "false" if mark else "true"}
    body: dict[str, Any] = {"metadata": metadata}
    kept_taints = [dict(taint) for taint in node.taints if taint.get("key") != KEY]
    if mark and method == "taint":
        body["spec"] = {"taints": [*kept_taints, {"key": KEY, "value": "true", "effect": EFFECT}]}
    elif not mark and len(kept_taints) < len(node.taints):
        body["spec"] = {"taints": kept_taints or None}
    return body


def _node(item: Mapping[str, Any]) -> Node:
    metadata, spec = item.get("metadata") or {}, item.get("spec") or {}
    return Node(
        name=str(metadata.get("name")),
        version=str(metadata.get("resourceVersion") or ""),
        taints=tuple(spec.get("taints") or ()),
        labels=metadata.get("labels") or {},
        reasons=_reasons((metadata.get("annotations") or {}).get(KEY)),
    )


def _reasons(text: str | None) -> tuple[OpenFailure, ...]:
    """Parse the annotation; empty if this package did not write it."""
    try:
        return tuple(record(OpenFailure, item) for item in parse_json(text or "[]"))
    except (ValueError, TypeError, UserError):
        return ()


def _not_allowed(verb: str) -> UserError:
    return UserError(f"This account may not {verb} the nodes of the cluster.", f"It needs {RULE}.")


def _refused(verb: str, server: str, error: ApiRefusedError) -> UserError:
    if error.status == 403:
        return _not_allowed(verb)
    if error.status == 409:
        return NodeChangedError("Another client changed the node in the meantime.", "Run it again.")
    if error.status == 404:
        return NodeError("The node is gone from the cluster.", "Nothing is to be done.")
    return api_error(error, server)
