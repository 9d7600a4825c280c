"""Name of the cluster where a run is launched, the same for every flow launched there.

Made where the run is launched, and carried to its tasks in ``FINETUNE_CLUSTER``: in a pod the API server has
another name than on a laptop. Where that variable is set before the launch, its value is the name.
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
UNKNOWN = "unknown"  # no kubeconfig or no region where a flow is compiled for someone else to deploy

_made: str | None = None  # by this process; any other value of the variable is the user's


def cluster_name(backend: Backend, values: Mapping[str, Any] | None = None) -> str:
    """The name of the target that a run of this backend is launched at from here.

    ``kubernetes:<API server's host>`` (its namespaces share the nodes), ``batch:<region>/<queue>`` or
    ``local:<hostname>``.

    Parameters
    ----------
    values:
        Those of the step's ``@kubernetes`` or ``@batch``; for what is missing, Metaflow's configuration.
    """
    if backend == "kubernetes":
        return f"kubernetes:{_api_server()}"
    if backend == "batch":
        queue = (values or {}).get("queue") or _metaflow.configured_target(backend).get("queue")
        return f"batch:{_queue(str(queue or UNKNOWN))}"
    return f"local:{socket.gethostname()}"


def current_cluster() -> str | None:
    """The name that this run was launched with; None in a process that knows nothing of a launch."""
    return os.environ.get(CLUSTER_VARIABLE) or None


def settle(step: StepView, queue: str | None = None) -> str:
    """Decide the name of the cluster from the step's target, and remember it.

    ``queue`` is the user's Batch queue, where it is not in the step's decorator yet; other backends' are not
    part of the name.
    """
    global _made
    given = current_cluster()
    if given is not None and given != _made:
        return given
    backend = step.backend()
    values = step.values(backend)
    if queue and backend == "batch":
        values["queue"] = queue
    _made = os.environ[CLUSTER_VARIABLE] = cluster_name(backend, values)
    return _made


def lowest_priority_class() -> str | None:
    """The Kubernetes PriorityClass that gives way to all others.

    None where there is none below that of a pod that names none, and where this machine may not ask for them:
    then a pod has the cluster's default.
    """
    try:
        with ClusterApi() as api:
            classes = read_priority_classes(api.get)
    except (UserError, ApiRefusedError, UnreachableError):
        return None
    usual = next((item.value for item in classes if item.is_default), 0)
    return next((item.name for item in classes if item.value < usual), None)


def _api_server() -> str:
    try:
        _, configuration = cluster_api.access(None)
    except (UserError, ImportError):
        return UNKNOWN
    return urlsplit(str(configuration.host)).netloc or UNKNOWN


def _queue(queue: str) -> str:
    """``region/name``, from a queue's name or its ARN (``arn:aws:batch:REGION:ACCOUNT:job-queue/NAME``)."""
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
    except BotoCoreError:  # a profile that there isn't
        return UNKNOWN
