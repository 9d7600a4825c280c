"""What Metaflow has no argument for in the pods that it makes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from decorators._metaflow.commands import deployer


def shape_pods(priority_class: str | None, affinity_of: Callable[[str], dict[str, Any]]) -> None:
    """From now on, give the pods that this process asks Kubernetes for what Metaflow has no argument for.

    That is a priority class, if one is named, in their environment the name of their node, NODE_NAME, and for
    those of a JobSet the affinity that ``affinity_of`` makes of its name. Holds for Jobs, JobSets and, where
    the flow is being deployed there, the templates of an Argo workflow.
    """
    from metaflow.plugins.kubernetes.kubernetes_job import KubernetesJob
    from metaflow.plugins.kubernetes.kubernetes_jobsets import JobSetSpec

    global _pod_makers
    _pod_makers = _pod_makers or (KubernetesJob.create_job_spec, JobSetSpec.dump)
    own_job, own_jobset = _pod_makers

    def create_job_spec(self: Any) -> Any:
        from kubernetes import client

        spec = own_job(self)
        field = client.V1ObjectFieldSelector(field_path="spec.nodeName")
        source = client.V1EnvVarSource(field_ref=field)
        pod = spec.template.spec
        pod.containers[0].env.append(client.V1EnvVar(name="NODE_NAME", value_from=source))
        if priority_class:
            pod.priority_class_name = priority_class
        return spec

    def dump(self: Any) -> Any:
        jobset = own_jobset(self)
        pod = jobset["template"]["spec"]["template"]["spec"]
        pod["containers"][0]["env"].append({"name": "NODE_NAME", **_NODE_NAME})
        pod["affinity"] = affinity_of(pod["subdomain"])  # which Metaflow names after the JobSet
        if priority_class:
            pod["priorityClassName"] = priority_class
        return jobset

    KubernetesJob.create_job_spec = create_job_spec
    JobSetSpec.dump = dump
    if deployer() == "argo-workflows":
        _shape_argo_pods(priority_class)


def _shape_argo_pods(priority_class: str | None) -> None:
    from metaflow.plugins.argo.argo_workflows import ArgoWorkflows

    global _argo_templates
    _argo_templates = _argo_templates or ArgoWorkflows._container_templates
    own = _argo_templates

    def container_templates(self: Any) -> Iterator[Any]:
        for template in own(self):
            container = template.payload.get("container")
            if container is not None:  # others are a JobSet's, which has them already
                container["env"].append({"name": "NODE_NAME", **_NODE_NAME})
                if priority_class:
                    template.payload["priorityClassName"] = priority_class
            yield template

    ArgoWorkflows._container_templates = container_templates


_NODE_NAME = {"valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}
# Metaflow's own, once shape_pods has put others in their place
_pod_makers: tuple[Any, Any] | None = None
_argo_templates: Callable[[Any], Iterator[Any]] | None = None
