"""What Kubernetes refuses, or why it can't be asked, in two lines for whoever has launched the run."""

from __future__ import annotations

import json

from decorators import _metaflow
from estimator.errors import UserError

_ROLE = "infra/kubernetes/base/rbac-launcher.yaml is the role that a launcher needs."


def install() -> None:
    """For the process that Metaflow starts for a remote step."""
    _metaflow.put_in_words(words)


def words(error: Exception, submitted: str) -> UserError:
    """``submitted``: what is on the cluster already, and goes on there; empty: nothing is."""
    status, said = _answer(error)
    if submitted:
        kind, name, *_, namespace = submitted.split()
        left = f"{submitted} goes on unwatched; kubectl delete {kind} {name} -n {namespace} ends it."
    else:
        left = ""
    if status is None:
        problem = f"The Kubernetes API can't be reached: {said}"
        return UserError(
            problem, left or "Look at the server's address in the kubeconfig, and at the network."
        )
    if status == 401:
        return UserError(
            "The Kubernetes API does not take this login (401): it is wrong, or has expired.",
            left or "Log in again, as for kubectl; kubectl auth can-i create jobs tells whether it works.",
        )
    return UserError(f"Kubernetes refuses: {said.rstrip('.')} ({status}).", left or _advice(status, said))


def _advice(status: int, said: str) -> str:
    if status == 403 and "exceeded quota" in said:
        return "Ask for less, or have the namespace's quota raised: kubectl describe resourcequota shows it."
    if status == 403:
        return _ROLE
    if status == 404 and "the server could not find the requested resource" in said:
        return "JobSet is not installed: infra/kubernetes says how; a step on several nodes needs it."
    if status == 404:
        return "Look at METAFLOW_KUBERNETES_NAMESPACE: the namespace has to be there."
    return "kubectl get events shows what happens on the cluster."


def _answer(error: BaseException) -> tuple[int | None, str]:
    """HTTP status and text of the answer; Metaflow may have put that into an exception of its own."""
    origin: BaseException | None = error
    while origin is not None and not hasattr(origin, "status"):
        origin = origin.__cause__ or origin.__context__
    if origin is None:
        return None, " ".join(str(error).rsplit(">: ", 1)[-1].split())
    try:
        said = str(json.loads(getattr(origin, "body", None) or "{}")["message"])
    except (ValueError, KeyError):
        said = str(getattr(origin, "reason", None) or origin)
    return getattr(origin, "status", None) or None, " ".join(said.split())
