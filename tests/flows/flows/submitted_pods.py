"""Start a flow ``--with kubernetes``, and print each step's Job or JobSet as Metaflow would submit it.

    python submitted_pods.py FLOW.py [OPTION]...

Nothing is run: the launch decides, as for any run, and the manifests go to standard output as JSON.
"""

from __future__ import annotations

import inspect
import json
import runpy
import sys
from typing import Any

from metaflow.plugins.kubernetes.kubernetes import Kubernetes
from metaflow.runtime import NativeRuntime

from decorators._metaflow.labels import _labeled
from decorators.backends.job_labels import labels_of

RENAMED = {"image": "docker_image", "image_pull_policy": "docker_image_pull_policy"}
NODES = 2


def manifests(runtime: Any) -> dict[str, Any]:
    """Return one manifest for each step of the flow."""
    from kubernetes import client

    pod_kinds, parameters_taken = {}, inspect.signature(Kubernetes.create_jobset).parameters
    for node in runtime._graph:
        decorators = {decorator.name: decorator for decorator in node.decorators}
        compute = decorators["kubernetes"]
        compute_values = {
            RENAMED.get(name, name): value
            for name, value in compute.attributes.items()
            if RENAMED.get(name, name) in parameters_taken
        }
        compute_values |= {
            "secrets": compute.attributes["secrets"] or [],
            "flow_name": runtime._flow.name,
            "run_id": "1",
            "step_name": node.name,
            "task_id": "2",
            "attempt": "0",
            "user": "tester",
            "code_package_metadata": "{}",
            "code_package_sha": "0",
            "code_package_url": "s3://code",
            "code_package_ds": runtime._flow_datastore.TYPE,
            "step_cli": "true",
            "run_time_limit": compute.run_time_limit,
            "env": dict(decorators["environment"].attributes["vars"]) if "environment" in decorators else {},
        }
        cluster = Kubernetes(runtime._flow_datastore, runtime._metadata, runtime._environment)
        if node.parallel_step:
            pod_kinds[node.name] = cluster.create_jobset(**compute_values, num_parallel=NODES).dump()
        else:
            job = cluster.create_job_object(**compute_values, name_pattern="t-").create()
            pod_kinds[node.name] = client.ApiClient().sanitize_for_serialization(job._job)
    return pod_kinds


def print_manifests(runtime: Any) -> None:
    """Stand in for the run."""
    print(json.dumps(manifests(runtime)))


if __name__ == "__main__":
    NativeRuntime.execute = print_manifests
    for name in ("create_job_object", "create_jobset"):  # as in the process that submits
        setattr(Kubernetes, name, _labeled(getattr(Kubernetes, name), labels_of))
    flow, *options = sys.argv[1:]
    sys.argv = [flow, *options]
    runpy.run_path(flow, run_name="__main__")
