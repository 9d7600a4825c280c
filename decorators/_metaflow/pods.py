"""Pod properties for which Metaflow has no arguments."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Callable, Iterator
from typing import Any

from metaflow.util import to_camelcase

from decorators._metaflow.commands import deployer

Json = dict[str, Any]


def shape_pods(
    patches_of: Callable[[str, str | None], list[Json]], merge: Callable[[Json, Json], Json], *, main: str
) -> None:
    """Patch the templates of the pods that this process requests from Kubernetes.

    Applies to Jobs, JobSets and, if the flow is being deployed to Argo, the templates of the workflow.

    Parameters
    ----------
    patches_of:
        ``patches_of(step, jobset)`` returns the patches of a step's pod template; ``jobset`` is None for a
        pod without a JobSet.
    merge:
        ``merge(template, patch)``: Kubernetes' strategic merge. Argo merges by itself.
    main:
        The name of the step's container in the patches.
    """
    from metaflow.plugins.kubernetes.kubernetes_job import KubernetesJob
    from metaflow.plugins.kubernetes.kubernetes_jobsets import JobSetSpec

    global _originals
    _originals = _originals or (KubernetesJob.create_job_spec, JobSetSpec.dump)
    original_job_spec, original_dump = _originals

    def without_pull_secrets(maker: Any, original: Callable[[Any], Any]) -> tuple[Any, list[str]]:
        # Metaflow passes V1LocalObjectReference positional arguments, which kubernetes 37 and newer reject
        values = maker._kwargs
        maker._kwargs = {**values, "image_pull_secrets": None}
        result = original(maker)
        maker._kwargs = values
        return result, list(values.get("image_pull_secrets") or [])

    def patched(template: Json, step: str, jobset: str | None, pull_secrets: list[str]) -> Json:
        name = template["spec"]["containers"][0]["name"]
        if pull_secrets:
            template["spec"]["imagePullSecrets"] = [{"name": secret} for secret in pull_secrets]
        return functools.reduce(
            merge, (_renamed(patch, main, name) for patch in patches_of(step, jobset)), template
        )

    def create_job_spec(self: Any) -> Any:
        from kubernetes import client

        spec, pull_secrets = without_pull_secrets(self, original_job_spec)
        template = client.ApiClient().sanitize_for_serialization(spec.template)
        spec.template = patched(template, self._kwargs["step_name"], None, pull_secrets)
        return spec

    def dump(self: Any) -> Any:
        jobset, pull_secrets = without_pull_secrets(self, original_dump)
        job = jobset["template"]["spec"]
        subdomain = job["template"]["spec"]["subdomain"]  # Metaflow uses the name of the JobSet
        # Argo's template names have dashes where step names, being Python identifiers, have underscores
        step = self._kwargs["step_name"].replace("-", "_")
        job["template"] = patched(job["template"], step, subdomain, pull_secrets)
        return jobset

    KubernetesJob.create_job_spec = create_job_spec
    JobSetSpec.dump = dump
    if deployer() == "argo-workflows":
        _shape_argo_pods(patches_of, merge)


def _renamed(patch: Json, main: str, name: str) -> Json:
    patch = copy.deepcopy(patch)
    for container in (patch.get("spec") or {}).get("containers") or []:
        if container.get("name") == main:
            container["name"] = name
    return patch


def _shape_argo_pods(
    patches_of: Callable[[str, str | None], list[Json]], merge: Callable[[Json, Json], Json]
) -> None:
    from metaflow.plugins.argo import argo_workflows
    from metaflow.plugins.argo.argo_workflows import ArgoWorkflows

    global _argo_templates
    _argo_templates = _argo_templates or ArgoWorkflows._container_templates
    original = _argo_templates
    argo_workflows.to_camelcase = _with_camel_case

    def container_templates(self: Any) -> Iterator[Any]:
        steps = {self._sanitize(node.name): node.name for node in self.graph}
        for template in original(self):
            payload = template.payload
            if (
                payload.get("container") is not None
            ):  # other templates create JobSets, which are patched already
                patches = patches_of(steps.get(payload["name"], ""), None)
                own_patch = json.loads(payload.get("podSpecPatch") or "{}")
                merged = functools.reduce(merge, patches, {"spec": own_patch})
                payload["podSpecPatch"] = json.dumps(merged["spec"])
                for kind, values in (merged.get("metadata") or {}).items():
                    payload.setdefault("metadata", {}).setdefault(kind, {}).update(values)
            yield template

    ArgoWorkflows._container_templates = container_templates


def _with_camel_case(value: Any) -> Any:
    """Convert keys like Metaflow's ``to_camelcase``, except resource names, which device plugins define."""
    if isinstance(value, dict):
        return {
            name if "/" in name else next(iter(to_camelcase({name: None}))): _with_camel_case(item)
            for name, item in value.items()
        }
    return [_with_camel_case(item) for item in value] if isinstance(value, list) else to_camelcase(value)


# Metaflow's original methods, saved by shape_pods
_originals: tuple[Any, Any] | None = None
_argo_templates: Callable[[Any], Iterator[Any]] | None = None
