"""Before anything is submitted: could this Kubernetes cluster ever run that request?

Every question has a limit in seconds, and so has the whole. What the cluster doesn't tell is unknown, which
stops no one; what can never work is a UserError after the table.
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
from estimator.plan import MIB, Request

JOBSET = "jobset.x-k8s.io"
JOBSET_VERSION = "v1alpha2"  # Metaflow asks for this one only
# A pod's whole name has at most 64 characters where it is its host name, as Metaflow asks for. With
# Metaflow's js-123456-worker-0-0.js-123456.NAMESPACE.svc.cluster.local that leaves 14 for the namespace.
LONGEST_NAMESPACE = 14
INSTALL_JOBSET = f"kubectl apply --server-side -f {tables.release('JobSet').manifest}"


def check_cluster(step_request: StepRequest) -> ClusterFacts:
    """Return the facts that the nodes report. Raises UserError if the cluster can never take the request.

    A cluster is asked once by each process, however many steps of a run want to know. Beside the largest step
    the nodes alone are looked at, quietly where they may do.
    """
    if not step_request.may_ask:
        return ClusterFacts()
    if step_request.beside:
        _check_beside(step_request)
        return step_request.facts
    return _check_once(
        step_request.request,
        step_request.options,
        PodSettings.of(step_request, gpus=bool(step_request.request.gpus_per_node)),
        step_request.minimum,
    )


def _check_beside(step_request: StepRequest) -> None:
    sizes = values_for(step_request).resources  # the user's own among them
    mib = {name: math.ceil(sizes[name] * MB / MIB) for name in ("memory", "disk")}
    request = replace(
        step_request.request, cpu=math.ceil(sizes["cpu"]), memory_mib=mib["memory"], disk_mib=mib["disk"]
    )
    _check_beside_once(
        step_request.step,
        request,
        step_request.options,
        PodSettings.of(step_request, gpus=bool(step_request.request.gpus_per_node)),
    )


@lru_cache(maxsize=4)
def _check_once(
    request: Request, options: Options, pods: PodSettings, minimum: MinimumRequest | None
) -> ClusterFacts:
    findings, facts = inspect(request, options=options, pods=pods, minimum=minimum)
    findings.settle()
    return facts


@lru_cache(maxsize=4)
def _check_beside_once(step: str, request: Request, options: Options, pods: PodSettings) -> None:
    findings = inspect_beside(step, request, options=options, pods=pods)
    if findings.impossible:
        findings.settle()


def inspect(
    request: Request,
    *,
    options: Options,
    pods: PodSettings,
    minimum: MinimumRequest | None = None,
    context: str | None = None,
    clock: Clock | None = None,
) -> tuple[Findings, ClusterFacts]:
    """All rows, and what the nodes have told. Raises UserError where the API cannot be used at all."""
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
            ask(preflight, check)
        facts = check_nodes(preflight)
        pod = rules.amounts(preflight, facts)
        for judge in (*rules.RULES, queues.queue):
            ask(preflight, partial(judge, pod=pod), judge.__name__)
        facts = replace(facts, near=_near(preflight))
    images.check(pods.image, preflight.findings, api.clock, gpus=bool(request.gpus_per_node))
    return preflight.findings, facts


def inspect_beside(
    step: str, request: Request, *, options: Options, pods: PodSettings, clock: Clock | None = None
) -> Findings:
    """The rows on nodes for another step of a run that :func:`inspect` has passed: its size differs."""
    with ClusterApi(clock=clock) as api:
        findings = Findings(where=f"For step {step}, Kubernetes context {api.context}")
        check_nodes(
            Preflight(
                api=api,
                request=request,
                options=options,
                pods=pods,
                minimum=None,
                findings=findings,
            )
        )
    return findings


def ask(preflight: Preflight, check: Callable[[Preflight], None], name: str = "") -> None:
    """One check; what cannot be asked is unknown."""
    name = (name or check.__name__).strip("_").replace("_", " ")
    try:
        check(preflight)
    except ApiRefusedError as error:
        preflight.findings.unknown(name, f"not told: {error}")
    except UnreachableError as error:
        preflight.findings.unknown(name, f"not told: {error}")


def access(preflight: Preflight) -> None:
    """Raise UserError where the API doesn't answer this login."""
    try:
        preflight.api.get("/apis")
    except (ApiRefusedError, UnreachableError) as error:
        if isinstance(error, UnreachableError) or error.status == 401:
            raise api_error(error, preflight.api.server) from None
        preflight.findings.unknown("access", f"its list of APIs is refused: {error}")


def namespace(preflight: Preflight) -> None:
    """Whether it is there, and short enough for the host names of pods of several nodes."""
    name = preflight.pods.namespace
    if preflight.request.nodes > 1 and len(name) > LONGEST_NAMESPACE:
        preflight.findings.no(
            "namespace",
            f"{name!r} has {len(name)} characters: pods of several nodes get host names of more than 64",
            f"Use one of at most {LONGEST_NAMESPACE} characters: METAFLOW_KUBERNETES_NAMESPACE=NAME",
        )
    if preflight.find(f"/api/v1/namespaces/{name}") is not None:
        preflight.findings.ok("namespace", name)
        return
    preflight.findings.no(
        "namespace",
        f"there is no {name!r}",
        f"kubectl create namespace {name}, or METAFLOW_KUBERNETES_NAMESPACE=NAME",
    )


def _permission(preflight: Preflight) -> None:
    if not preflight.pods.submits:
        return
    many = preflight.request.nodes > 1
    job = ("jobsets", JOBSET) if many else ("jobs", "batch")
    needed = [("create", *job), ("get", *job), ("list", "pods", "")]
    useful = [("delete" if many else "patch", *job), ("list", "events", "")]
    refused = [item for item in needed if not allowed(preflight, *item)]
    for verb, resource, group in refused:
        preflight.findings.no(
            "permission",
            f"this login may not {verb} {resource} in {preflight.pods.namespace}",
            f"kubectl create role launcher -n {preflight.pods.namespace} --verb={verb} "
            f"--resource={resource}{'.' + group if group else ''} (infra/kubernetes/base has all of it)",
        )
    for verb, resource, _ in useful:
        if not refused and not allowed(preflight, verb, resource, job[1] if resource == job[0] else ""):
            why = (
                "a run that is stopped leaves it behind"
                if resource == job[0]
                else "no reason of a wait is shown"
            )
            preflight.findings.unknown(
                "permission", f"this login may not {verb} {resource}: {why}", "infra/kubernetes/base"
            )
    if not refused:
        preflight.findings.ok("permission", f"{job[0]} may be created")


def allowed(preflight: Preflight, verb: str, resource: str, group: str) -> bool:
    """Whether this login may do that in the namespace."""
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
        f"there is no {name!r} in {preflight.pods.namespace}: its pods are never made",
        f"kubectl create serviceaccount {name} -n {preflight.pods.namespace}",
    )


def _near(preflight: Preflight) -> str | None:
    """Return the topology by which Kueue keeps the nodes together; None also if this login may not read
    it.
    """
    try:
        near = queues.near(preflight)
    except (ApiRefusedError, UnreachableError) as error:
        preflight.findings.unknown("topology", f"of the queue, not told: {error}", "infra/kubernetes/base")
        return None
    if near is not None:
        preflight.findings.ok("topology", f"Kueue is asked to keep the nodes together by {near}")
    return near


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


CHECKS = (namespace, _permission, _service_account, _jobset)  # of what runs of any size need
