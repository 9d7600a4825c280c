"""Messages for errors of the Kubernetes API and failures of pods."""

from __future__ import annotations

from collections.abc import Callable

from decorators import _metaflow
from decorators._metaflow import WaitedJob
from decorators.backends import oom_kills
from decorators.backends.kubernetes.losses import look
from decorators.backends.kubernetes.waiting import pods_of
from estimator.errors import UserError
from estimator.hardware.cluster.api import (
    ApiRefusedError,
    ClusterApi,
    Json,
    UnreachableError,
    api_error,
    failure_of,
)

_OF_METAFLOW = "[save_logs]"  # its own lines in a pod's log
_ROLE = "infra/kubernetes/base/rbac-launcher.yaml is the role that a launcher needs."


def install(ended: Callable[[list[str]], None] = lambda _: None) -> None:
    """For the process that Metaflow starts for a remote step: note pods while it waits, refusals in words.

    ``ended`` gets the lines of a step that failed.
    """

    def describe(job: WaitedJob) -> list[str]:
        lines = failed_pods(job)
        ended(lines)
        return lines

    _metaflow.watch_waiting(look)
    _metaflow.put_in_words(explain, describe)


def failed_pods(job: WaitedJob) -> list[str]:
    """A line for each pod that has failed: where, and why; none where the API doesn't tell.

    A pod that has run out of memory is also noted for the step's next attempt.
    """
    try:
        with ClusterApi() as api:
            failed = [pod for pod in pods_of(api, job) if pod.get("status", {}).get("phase") == "Failed"]
    except (ApiRefusedError, UnreachableError, UserError):
        return []
    oom_kills.note(oom_kills.in_pods(failed))
    return [f"pod {pod['metadata']['name']} on {_node(pod)} has failed: {_end_of(pod)}" for pod in failed]


def _node(pod: Json) -> str:
    return str(pod["spec"].get("nodeName") or "no node")


def _end_of(pod: Json) -> str:
    """Return the node's message, or else the container's exit code and last line."""
    status = pod["status"]
    if reason := ": ".join(status[key] for key in ("reason", "message") if status.get(key)):
        return reason
    for ended in oom_kills.endings(pod)[:1]:
        lines = [line.strip() for line in str(ended.get("message") or "").splitlines()]
        last = next((line for line in reversed(lines) if line and not line.startswith(_OF_METAFLOW)), "")
        code = f"{ended.get('reason') or 'Error'} (exit code {ended.get('exitCode', 'unknown')})"
        return f"{code}: {last}" if last else code
    return "the node doesn't say why"


def explain(error: Exception, submitted: str) -> UserError:
    """Explain an error of the API server, or why it cannot be reached, and what to do about it.

    ``submitted``: what is on the cluster already, and goes on there; empty: nothing is.
    """
    failure = failure_of(error)
    if submitted:
        kind, name, *_, namespace = submitted.split()
        left = f"{submitted} goes on unwatched; kubectl delete {kind} {name} -n {namespace} ends it."
    else:
        left = ""
    if isinstance(failure, UnreachableError) or failure.status == 401:
        translated = api_error(failure)
        return UserError(translated.problem, left or translated.advice)
    status, words = failure.status, failure.words
    return UserError(f"Kubernetes refuses: {words.rstrip('.')} ({status}).", left or _advice(status, words))


def _advice(status: int, words: str) -> str:
    if status == 403 and "exceeded quota" in words:
        return "Ask for less, or have the namespace's quota raised: kubectl describe resourcequota shows it."
    if status == 403:
        return _ROLE
    if status == 404 and "the server could not find the requested resource" in words:
        return "JobSet is not installed: infra/kubernetes says how; a step on several nodes needs it."
    if status == 404:
        return "Look at METAFLOW_KUBERNETES_NAMESPACE: the namespace has to be there."
    return "kubectl get events shows what happens on the cluster."
