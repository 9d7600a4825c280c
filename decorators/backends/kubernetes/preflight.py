"""Preflight for Kubernetes: check before submission whether the cluster could ever run a request.

Each API call has a time limit, and so has the whole preflight. Checks without a result are unknown and do not
block the run; a check that can never pass raises UserError after the table was printed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial

from decorators.backends import tables
from decorators.backends.findings import Findings
from decorators.backends.interface import ClusterFacts, MinimumRequest, StepRequest
from decorators.backends.kubernetes import images, queues, rules
from decorators.backends.kubernetes.nodes import PodSettings, Preflight, check_nodes
from decorators.backends.kubernetes.request import MB, values_for
from decorators.backends.options import Options
from estimator.hardware.cluster.api import ApiRefusedError, Clock, ClusterApi, UnreachableError, api_error
from estimator.hardware.cluster.nodes import ARCH
from estimator.plan import MIB, Request

USUAL_ARCH = "amd64"  # of images that say nothing else
JOBSET = "jobset.x-k8s.io"
JOBSET_VERSION = "v1alpha2"  # the version that Metaflow uses
# Metaflow sets the fully qualified host name of pods, which has at most 64 characters. In its
# js-123456-worker-0-0.js-123456.NAMESPACE.svc.cluster.local this leaves 14 for the namespace.
MAX_NAMESPACE_LENGTH = 14
INSTALL_JOBSET = f"kubectl apply --server-side -f {tables.release('JobSet').manifest}"


def check_cluster(step_request: StepRequest) -> ClusterFacts:
    """Return the facts that the nodes report. Raises UserError if the cluster can never run the request.

    Each process checks a cluster once for all steps of a run. For steps other than the largest only the nodes
    are checked, and a table is printed only if they do not fit.
    """
    if not step_request.may_query:
        return ClusterFacts()
    if step_request.size_only:
        _check_size(step_request)
        return step_request.facts
    return _check_once(
        step_request.request,
        step_request.options,
        PodSettings.of(step_request, gpus=bool(step_request.request.gpus_per_node)),
        step_request.minimum,
    )


def _check_size(step_request: StepRequest) -> None:
    sizes = values_for(step_request).resources  # including the user's values
    mib = {name: math.ceil(sizes[name] * MB / MIB) for name in ("memory", "disk")}
    request = replace(
        step_request.request, cpu=math.ceil(sizes["cpu"]), memory_mib=mib["memory"], disk_mib=mib["disk"]
    )
    pods = PodSettings.of(step_request, gpus=bool(request.gpus_per_node))
    if step_request.facts.arch and not request.gpus_per_node:
        pods = replace(pods, node_selector=(*pods.node_selector, (ARCH, step_request.facts.arch)))
    _check_size_once(step_request.step, request, step_request.options, pods)


@lru_cache(maxsize=4)
def _check_once(
    request: Request, options: Options, pods: PodSettings, minimum: MinimumRequest | None
) -> ClusterFacts:
    findings, facts = inspect(request, options=options, pods=pods, minimum=minimum)
    findings.report_and_check()
    return facts


@lru_cache(maxsize=4)
def _check_size_once(step: str, request: Request, options: Options, pods: PodSettings) -> None:
    findings = inspect_size(step, request, options=options, pods=pods)
    if findings.impossible:
        findings.report_and_check()


def inspect(
    request: Request,
    *,
    options: Options,
    pods: PodSettings,
    minimum: MinimumRequest | None = None,
    context: str | None = None,
    clock: Clock | None = None,
) -> tuple[Findings, ClusterFacts]:
    """Return all findings and the nodes' facts. Raises UserError if the API cannot be used."""
    with ClusterApi(context, clock=clock) as api:
        where = f"Kubernetes context {api.context}, namespace {pods.namespace},"
        preflight = Preflight(
            api=api,
            request=request,
            options=options,
            pods=pods,
            minimum=minimum,
            findings=Findings(where=where),
        )
        access(preflight)
        for check in CHECKS:
            run_check(preflight, check)
        facts = check_nodes(preflight)
        pod = rules.amounts(preflight, facts)
        for judge in (*rules.RULES, queues.queue):
            run_check(preflight, partial(judge, pod=pod), judge.__name__)
        facts = replace(facts, near=_near(preflight), queue_system=_queue_system(preflight))
    built_for = images.check(pods.image, preflight.findings, api.clock, gpus=bool(request.gpus_per_node))
    return preflight.findings, replace(facts, arch=_architecture(preflight, facts, built_for))


def _architecture(preflight: Preflight, facts: ClusterFacts, built_for: frozenset[str] | None) -> str | None:
    """Check that the image is built for the nodes' CPUs; return what steps without GPUs select, None: any."""
    image = preflight.pods.image
    fix = f"Build it for them (docker buildx build --platform linux/{facts.arch}), or use other nodes"
    if facts.arch and built_for is not None and facts.arch not in built_for:
        detail = f"{image} is built for {' and '.join(sorted(built_for))}, the nodes are {facts.arch}"
        preflight.findings.no("image", detail, fix)
    elif facts.arch not in (None, USUAL_ARCH) and built_for is None:
        detail = f"the nodes are {facts.arch}; whether {image or 'the image'} is built for them is unknown"
        preflight.findings.unknown("image", detail, fix)
    usable = [arch for arch in facts.archs if built_for is None or arch in built_for]
    if len(facts.archs) < 2 or (built_for is not None and len(usable) == len(facts.archs)):
        return None
    return facts.arch if facts.arch in usable else next(iter(usable), None)


def inspect_size(
    step: str, request: Request, *, options: Options, pods: PodSettings, clock: Clock | None = None
) -> Findings:
    """Return findings on nodes for a step of another size, of a run that passed :func:`inspect`."""
    with ClusterApi(clock=clock) as api:
        findings = Findings(where=f"For step {step}, Kubernetes context {api.context}")
        check_nodes(
            Preflight(api=api, request=request, options=options, pods=pods, minimum=None, findings=findings)
        )
    return findings


def run_check(preflight: Preflight, check: Callable[[Preflight], None], name: str = "") -> None:
    """Run one check; if the API does not respond, its finding is unknown."""
    name = (name or check.__name__).strip("_").replace("_", " ")
    try:
        check(preflight)
    except (ApiRefusedError, UnreachableError) as error:
        preflight.findings.unknown(name, f"no response: {error}")


def access(preflight: Preflight) -> None:
    """Raise UserError if the API does not accept this login."""
    try:
        preflight.api.get("/apis")
    except (ApiRefusedError, UnreachableError) as error:
        if isinstance(error, UnreachableError) or error.status == 401:
            raise api_error(error, preflight.api.server) from None
        preflight.findings.unknown("access", f"listing the APIs is denied: {error}")


def namespace(preflight: Preflight) -> None:
    """Check that the namespace exists and is short enough for the host names of multi-node pods."""
    name = preflight.pods.namespace
    if preflight.request.nodes > 1 and len(name) > MAX_NAMESPACE_LENGTH:
        preflight.findings.no(
            "namespace",
            f"{name!r} has {len(name)} characters: host names of multi-node pods would exceed 64",
            f"Use one with at most {MAX_NAMESPACE_LENGTH} characters: METAFLOW_KUBERNETES_NAMESPACE=NAME",
        )
    if preflight.find(f"/api/v1/namespaces/{name}") is not None:
        preflight.findings.ok("namespace", name)
        return
    preflight.findings.no(
        "namespace",
        f"{name!r} does not exist",
        f"kubectl create namespace {name}, or METAFLOW_KUBERNETES_NAMESPACE=NAME",
    )


def _permission(preflight: Preflight) -> None:
    if not preflight.pods.submits:
        return
    multi_node = preflight.request.nodes > 1
    job = ("jobsets", JOBSET) if multi_node else ("jobs", "batch")
    required = [("create", *job), ("get", *job), ("list", "pods", "")]
    optional = [("delete" if multi_node else "patch", *job), ("list", "events", "")]
    refused = [item for item in required if not allowed(preflight, *item)]
    for verb, resource, group in refused:
        preflight.findings.no(
            "permission",
            f"this login may not {verb} {resource} in {preflight.pods.namespace}",
            f"kubectl create role launcher -n {preflight.pods.namespace} --verb={verb} "
            f"--resource={resource}{'.' + group if group else ''} (all permissions: infra/kubernetes/base)",
        )
    for verb, resource, _ in optional:
        if not refused and not allowed(preflight, verb, resource, job[1] if resource == job[0] else ""):
            consequence = (
                "a stopped run will not be removed"
                if resource == job[0]
                else "reasons for waiting are not shown"
            )
            preflight.findings.unknown(
                "permission", f"this login may not {verb} {resource}: {consequence}", "infra/kubernetes/base"
            )
    if not refused:
        preflight.findings.ok("permission", f"may create {job[0]}")


def allowed(preflight: Preflight, verb: str, resource: str, group: str) -> bool:
    """Whether this login has a permission in the namespace."""
    return preflight.api.may(verb, resource, group=group, namespace=preflight.pods.namespace)


def _service_account(preflight: Preflight) -> None:
    name = preflight.pods.service_account
    if not name:
        return
    if preflight.find(preflight.namespaced("serviceaccounts", name)) is not None:
        preflight.findings.ok("service account", name)
        return
    preflight.findings.no(
        "service account",
        f"{name!r} does not exist in {preflight.pods.namespace}: pods would never be created",
        f"kubectl create serviceaccount {name} -n {preflight.pods.namespace}",
    )


def _near(preflight: Preflight) -> str | None:
    """Return the topology label by which Kueue keeps nodes together; None if unreadable or not set."""
    try:
        near = queues.near(preflight)
    except (ApiRefusedError, UnreachableError) as error:
        preflight.findings.unknown("topology", f"of the queue, no access: {error}", "infra/kubernetes/base")
        return None
    if near is not None:
        preflight.findings.ok("topology", f"Kueue keeps the nodes together by {near}")
    return near


def _queue_system(preflight: Preflight) -> str | None:
    """Return what manages the run's queue; None without a queue, or if it cannot be read."""
    name = preflight.options.queue_for(preflight.request.gpu_type)
    try:
        return queues.manager(preflight, name)[0] if name else None
    except (ApiRefusedError, UnreachableError):
        return None  # the check of the queue reports it


def _jobset(preflight: Preflight) -> None:
    if preflight.request.nodes < 2:
        return
    resources = preflight.find(f"/apis/{JOBSET}/{JOBSET_VERSION}") or {}
    if any(item.get("name") == "jobsets" for item in resources.get("resources") or []):
        preflight.findings.ok("jobset", f"{JOBSET}/{JOBSET_VERSION}")
    else:
        preflight.findings.no(
            "jobset",
            f"{preflight.request.nodes} nodes need JobSet ({JOBSET}/{JOBSET_VERSION}), "
            "which is not installed",
            INSTALL_JOBSET,
        )


CHECKS = (namespace, _permission, _service_account, _jobset)  # requirements of runs of any size
