"""Messages for errors of the Kubernetes API and failures of pods."""

from __future__ import annotations

from collections.abc import Callable

from decorators import _metaflow
from decorators._metaflow import WaitedJob
from decorators.backends import oom_kills
from decorators.backends.kubernetes.losses import observe
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

_OF_METAFLOW = "[save_logs]"  # prefix of Metaflow's lines in a pod's log
_ROLE = "See infra/kubernetes/base/rbac-launcher.yaml for the role that a launcher needs."


def install(on_end: Callable[[list[str]], None] = lambda _: None) -> None:
    """Install pod observation and error messages in the process that Metaflow starts for a remote step.

    ``on_end`` receives one line per failed pod.
    """

    def describe(job: WaitedJob) -> list[str]:
        lines = failed_pods(job)
        on_end(lines)
        return lines

    _metaflow.watch_waiting(observe)
    _metaflow.explain_kubernetes_errors(explain, describe)


def failed_pods(job: WaitedJob) -> list[str]:
    """Return one line per failed pod with its node and reason; empty if the API does not respond.

    A pod that ran out of memory is also recorded for the step's next attempt.
    """
    try:
        with ClusterApi() as api:
            failed = [pod for pod in pods_of(api, job) if pod.get("status", {}).get("phase") == "Failed"]
    except (ApiRefusedError, UnreachableError, UserError):
        return []
    oom_kills.note(oom_kills.in_pods(failed))
    return [f"pod {pod['metadata']['name']} on {_node(pod)} failed: {_end_of(pod)}" for pod in failed]


def _node(pod: Json) -> str:
    return str(pod["spec"].get("nodeName") or "no node")


def _end_of(pod: Json) -> str:
    """Return the node's message, else the container's exit code and last line."""
    status = pod["status"]
    if reason := ": ".join(status[key] for key in ("reason", "message") if status.get(key)):
        return reason
    for end in oom_kills.container_ends(pod)[:1]:
        lines = [line.strip() for line in str(end.get("message") or "").splitlines()]
        message = next((line for line in reversed(lines) if line and not line.startswith(_OF_METAFLOW)), "")
        code = f"{end.get('reason') or 'Error'} (exit code {end.get('exitCode', 'unknown')})"
        return f"{code}: {message}" if message else code
    return "no reason reported by the node"


def explain(error: Exception, submitted: str) -> UserError:
    """Convert an error of the API server, or a failure to reach it, to a problem and advice.

    ``submitted``: job that still runs on the cluster; empty if there is none.
    """
    failure = failure_of(error)
    if submitted:
        kind, name, *_, namespace = submitted.split()
        running_job = f"{submitted} still runs. End it: kubectl delete {kind} {name} -n {namespace}"
    else:
        running_job = ""
    if isinstance(failure, UnreachableError) or failure.status == 401:
        translated = api_error(failure)
        return UserError(translated.problem, running_job or translated.advice)
    status, reason = failure.status, failure.message
    return UserError(
        f"Kubernetes refuses: {reason.rstrip('.')} ({status}).", running_job or _advice(status, reason)
    )


def _advice(status: int, reason: str) -> str:
    if status == 403 and "exceeded quota" in reason:
        return "Request less, or have the quota raised. Show it: kubectl describe resourcequota"
    if status == 403:
        return _ROLE
    if status == 404 and "the server could not find the requested resource" in reason:
        return "Install JobSet, which multi-node steps need: see infra/kubernetes."
    if status == 404:
        return "Check METAFLOW_KUBERNETES_NAMESPACE: the namespace must exist."
    return "Show the cluster's events: kubectl get events"
