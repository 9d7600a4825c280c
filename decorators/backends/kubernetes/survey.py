"""Capabilities of a cluster for runs of any size: the preflight without the checks of nodes."""

from __future__ import annotations

from dataclasses import replace

from decorators.backends.findings import Findings
from decorators.backends.kubernetes import images
from decorators.backends.kubernetes.nodes import PodSettings, Preflight
from decorators.backends.kubernetes.preflight import CHECKS, access, allowed, namespace, run_check
from decorators.backends.options import Options
from estimator.hardware.cluster.api import Clock, ClusterApi
from estimator.plan import Request

ARGO, ARGO_VERSION = "argoproj.io", "v1alpha1"


def survey(pods: PodSettings, *, clock: Clock | None = None) -> tuple[Findings, Findings, Findings]:
    """Check the requirements of single-node steps, of multi-node steps, and of Argo Workflows.

    Returns the findings in this order. Raises UserError if the API cannot be used.
    """
    with ClusterApi(clock=clock) as api:
        single_node, multi_node = (
            Preflight(
                api=api,
                request=Request(
                    nodes=nodes,
                    gpus_per_node=0,
                    gpu_type=None,
                    cpu=1,
                    memory_mib=1,
                    shared_memory_mib=0,
                    disk_mib=0,
                ),
                options=Options(),
                pods=pods,
                minimum=None,
                findings=Findings(where=f"context {api.context}:"),
            )
            for nodes in (1, 2)
        )
        access(single_node)
        for preflight in (single_node, multi_node):
            for check in CHECKS:
                run_check(preflight, check)
        argo = replace(single_node, findings=Findings(where=single_node.findings.where))
        for check in (namespace, _argo):
            run_check(argo, check)
    images.check(pods.image, single_node.findings, api.clock, gpus=True)
    return single_node.findings, multi_node.findings, argo.findings


def _argo(preflight: Preflight) -> None:
    resources = preflight.find(f"/apis/{ARGO}/{ARGO_VERSION}") or {}
    if not any(item.get("name") == "workflowtemplates" for item in resources.get("resources") or []):
        preflight.findings.no(
            "argo",
            f"Argo Workflows ({ARGO}/{ARGO_VERSION}) is not installed",
            "Install Argo Workflows there; docs/deployments.md",
        )
    elif not allowed(preflight, "create", "workflowtemplates", ARGO):
        preflight.findings.no(
            "permission",
            f"this login may not create workflowtemplates in {preflight.pods.namespace}",
            f"kubectl create role deployer -n {preflight.pods.namespace} --verb=create,get,patch "
            f"--resource=workflowtemplates.{ARGO}",
        )
    else:
        preflight.findings.ok("argo", f"{ARGO}/{ARGO_VERSION}")
