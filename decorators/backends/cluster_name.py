"""Name of a run's target cluster, the same for all flows launched there.

Determined at launch and passed to the tasks in ``FINETUNE_CLUSTER``, because the API server has another name
inside a pod than on a laptop. If the variable is set before the launch, its value is the name.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from decorators import _metaflow
from decorators._metaflow import Backend, StepView
from estimator.errors import UserError
from estimator.hardware.cluster import api as cluster_api
from estimator.hardware.cluster.api import ApiRefusedError, ClusterApi, UnreachableError
from estimator.hardware.cluster.priorities import read_priority_classes

CLUSTER_VARIABLE = "FINETUNE_CLUSTER"
UNKNOWN = "unknown"  # no kubeconfig or region, as when a flow is only compiled

_decided_name: str | None = None  # set by this process; another value of the variable was set by the user


def cluster_name(backend: Backend, values: Mapping[str, Any] | None = None) -> str:
    """Return the name of the target for runs of this backend.

    ``kubernetes:<API server's host>`` (its namespaces share the nodes), ``batch:<region>/<queue>`` or
    ``local:<hostname>``.

    Parameters
    ----------
    values:
        Values of the step's ``@kubernetes`` or ``@batch``; missing ones are taken from Metaflow's
        configuration.
    """
    if backend == "kubernetes":
        return f"kubernetes:{_api_server()}"
    if backend == "batch":
        queue = (values or {}).get("queue") or _metaflow.configured_target(backend).get("queue")
        return f"batch:{_queue(str(queue or UNKNOWN))}"
    return f"local:{socket.gethostname()}"


def current_cluster() -> str | None:
    """Return the name that this run was launched with; None outside of a launched run."""
    return os.environ.get(CLUSTER_VARIABLE) or None


def decide_cluster_name(step: StepView, queue: str | None = None) -> str:
    """Determine the name of the cluster from the step's target, and store it for the tasks.

    ``queue`` is the user's Batch queue if the step's decorator does not have it yet; queues of other backends
    are not part of the name.
    """
    global _decided_name
    inherited = current_cluster()
    if inherited is not None and inherited != _decided_name:
        return inherited
    backend = step.backend()
    values = step.values(backend)
    if queue and backend == "batch":
        values["queue"] = queue
    _decided_name = os.environ[CLUSTER_VARIABLE] = cluster_name(backend, values)
    return _decided_name


def lowest_priority_class() -> str | None:
    """Return the Kubernetes PriorityClass with the lowest priority.

    None if no class is below the cluster's default, or if this machine may not list them; pods then get the
    default.
    """
    try:
        with ClusterApi() as api:
            classes = read_priority_classes(api.get)
    except (UserError, ApiRefusedError, UnreachableError):
        return None
    default = next((item.value for item in classes if item.is_default), 0)
    return next((item.name for item in classes if item.value < default), None)


def _api_server() -> str:
    try:
        _, configuration = cluster_api.access(None)
    except (UserError, ImportError):
        return UNKNOWN
    return urlsplit(str(configuration.host)).netloc or UNKNOWN


def _queue(queue: str) -> str:
    """Return ``region/name`` for a queue's name or ARN (``arn:aws:batch:REGION:ACCOUNT:job-queue/NAME``)."""
    if queue.startswith("arn:"):
        return f"{queue.split(':')[3] or UNKNOWN}/{queue.rpartition('/')[2]}"
    return f"{_region()}/{queue}"


def _region() -> str:
    try:
        from boto3.session import Session
        from botocore.exceptions import BotoCoreError
    except ImportError:
        return os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or UNKNOWN
    try:
        return Session().region_name or UNKNOWN
    except BotoCoreError:  # the configured profile does not exist
        return UNKNOWN
