"""Before anything is submitted: could this Kubernetes cluster ever run that request?

Every question has a limit in seconds, and so has the whole. What the cluster doesn't tell is unknown, which
stops nobody; what can never work is a UserError after the table.
"""

from __future__ import annotations

from collections.abc import Callable

from decorators.backends import tables
from decorators.backends.findings import Clock, Findings
from decorators.backends.kubernetes import images
from decorators.backends.kubernetes.api import ApiRefusedError, ClusterApi, Json, UnreachableError
from decorators.backends.kubernetes.fit import Least
from decorators.backends.kubernetes.nodes import Look, Step, check_nodes
from decorators.backends.kubernetes.request import ClusterFacts
from decorators.backends.options import Options
from estimator.errors import UserError
from estimator.plan import GIB, MIB, Request

GPUS = "nvidia.com/gpu"
JOBSET, KUEUE = "jobset.x-k8s.io", "kueue.x-k8s.io"
JOBSET_VERSION = "v1alpha2"  # Metaflow asks for this one only
# A pod's whole name has at most 64 characters where it is its host name, as Metaflow asks for. With
# Metaflow's js-123456-worker-0-0.js-123456.NAMESPACE.svc.cluster.local that leaves 14 for the namespace.
LONGEST_NAMESPACE = 14
INSTALL_JOBSET = f"kubectl apply --server-side -f {tables.release('JobSet').manifest}"
INSTALL_KUEUE = f"kubectl apply --server-side -f {tables.release('Kueue').manifest}"


def look(
    request: Request,
    *,
    options: Options,
    step: Step,
    least: Least | None = None,
    context: str | None = None,
    clock: Clock | None = None,
) -> tuple[Findings, ClusterFacts]:
    """All rows, and what the nodes have told. Raises UserError where the API can't be used at all."""
    with ClusterApi(context) as api:
        where = f"Kubernetes context {api.context}, namespace {step.namespace},"
        seen = Look(
            api=api,
            request=request,
            options=options,
            step=step,
            least=least,
            findings=Findings(where=where),
            clock=clock or Clock(),
        )
        _access(seen)
        for check in (_namespace, _permission, _service_account, _jobset, _kueue, _quota):
            _ask(seen, check)
        facts = check_nodes(seen)
    images.check(step.image, seen.findings, seen.clock, gpus=bool(request.gpus_per_node))
    return seen.findings, facts


def look_beside(
    name: str, request: Request, *, options: Options, step: Step, clock: Clock | None = None
) -> Findings:
    """The rows on nodes for another step of a run that :func:`look` has passed: its size differs."""
    with ClusterApi() as api:
        findings = Findings(where=f"For step {name}, Kubernetes context {api.context}")
        check_nodes(
            Look(
                api=api,
                request=request,
                options=options,
                step=step,
                least=None,
                findings=findings,
                clock=clock or Clock(),
            )
        )
    return findings


def _ask(seen: Look, check: Callable[[Look], None]) -> None:
    """One check; what can't be asked is unknown."""
    name = check.__name__.strip("_").replace("_", " ")
    try:
        check(seen)
    except ApiRefusedError as error:
        seen.findings.unknown(name, f"not told: {error}")
    except UnreachableError as error:
        seen.findings.unknown(name, f"not told: {error}")


def _access(seen: Look) -> None:
    api = seen.api
    try:
        seen.get("/apis")
    except UnreachableError as error:
        raise UserError(
            f"The Kubernetes API of context {api.context!r} ({api.host}) can't be reached: {error}.",
            "Is it the right context (`kubectl config current-context`), the cluster up, and the VPN?",
        ) from None
    except ApiRefusedError as error:
        if error.status == 401:
            raise UserError(
                f"The Kubernetes API of context {api.context!r} doesn't know who asks (401).",
                "The login may be over: log in again, and try `kubectl get pods`.",
            ) from None
        seen.findings.unknown("access", f"its list of APIs is refused: {error}")


def _namespace(seen: Look) -> None:
    name = seen.step.namespace
    if seen.request.nodes > 1 and len(name) > LONGEST_NAMESPACE:
        seen.findings.no(
            "namespace",
            f"{name!r} has {len(name)} characters: pods of several nodes get host names of more than 64",
            f"Use one of at most {LONGEST_NAMESPACE} characters: METAFLOW_KUBERNETES_NAMESPACE=NAME",
        )
    if seen.find(f"/api/v1/namespaces/{name}") is not None:
        seen.findings.ok("namespace", name)
        return
    seen.findings.no(
        "namespace",
        f"there is no {name!r}",
        f"kubectl create namespace {name}, or METAFLOW_KUBERNETES_NAMESPACE=NAME",
    )


def _permission(seen: Look) -> None:
    if not seen.step.submits:
        return
    many = seen.request.nodes > 1
    job = ("jobsets", JOBSET) if many else ("jobs", "batch")
    needed = [("create", *job), ("get", *job), ("list", "pods", "")]
    useful = [("delete" if many else "patch", *job), ("list", "events", "")]
    refused = [item for item in needed if not _allowed(seen, *item)]
    for verb, resource, group in refused:
        seen.findings.no(
            "permission",
            f"this login may not {verb} {resource} in {seen.step.namespace}",
            f"kubectl create role launcher -n {seen.step.namespace} --verb={verb} "
            f"--resource={resource}{'.' + group if group else ''} (infra/kubernetes/base has all of it)",
        )
    for verb, resource, _ in useful:
        if not refused and not _allowed(seen, verb, resource, job[1] if resource == job[0] else ""):
            why = (
                "a run that is stopped leaves it behind"
                if resource == job[0]
                else "no reason of a wait is shown"
            )
            seen.findings.unknown(
                "permission", f"this login may not {verb} {resource}: {why}", "infra/kubernetes/base"
            )
    if not refused:
        seen.findings.ok("permission", f"{job[0]} may be created")


def _allowed(seen: Look, verb: str, resource: str, group: str) -> bool:
    return seen.may(verb, resource, group=group, namespace=seen.step.namespace)


def _service_account(seen: Look) -> None:
    name = seen.step.service_account
    if not name:
        return
    if seen.find(seen.namespaced("serviceaccounts", name)) is not None:
        seen.findings.ok("service account", name)
        return
    seen.findings.no(
        "service account",
        f"there is no {name!r} in {seen.step.namespace}: its pods are never made",
        f"kubectl create serviceaccount {name} -n {seen.step.namespace}",
    )


def _jobset(seen: Look) -> None:
    if seen.request.nodes < 2:
        return
    found = seen.find(f"/apis/{JOBSET}/{JOBSET_VERSION}") or {}
    if any(item.get("name") == "jobsets" for item in found.get("resources") or []):
        seen.findings.ok("jobset", f"{JOBSET}/{JOBSET_VERSION}")
    else:
        seen.findings.no(
            "jobset",
            f"{seen.request.nodes} nodes need JobSet ({JOBSET}/{JOBSET_VERSION}), which is not installed",
            INSTALL_JOBSET,
        )


def _kueue(seen: Look) -> None:
    queue = seen.options.queue_for(seen.request.gpu)
    if not queue:
        return
    group = seen.find(f"/apis/{KUEUE}")
    if group is None:
        seen.findings.no(
            "queue",
            f"{queue!r} is a queue of Kueue, which is not installed",
            f"Leave out --queue, or install Kueue: {INSTALL_KUEUE} (queues: infra/kubernetes/README.md)",
        )
        return
    version = group["preferredVersion"]["groupVersion"]
    found = seen.find(seen.namespaced("localqueues", queue, version))
    if found is None:
        _other_queues(seen, queue, version)
    else:
        _queue_state(seen, queue, found)


def _other_queues(seen: Look, queue: str, version: str) -> None:
    listed = seen.get(seen.namespaced("localqueues", "", version)).get("items") or []
    others = [item["metadata"]["name"] for item in listed]
    seen.findings.no(
        "queue",
        f"namespace {seen.step.namespace} has no LocalQueue {queue!r}",
        f"--queue {' or '.join(others[:5])}"
        if others
        else f"kubectl get localqueues -n {seen.step.namespace}; infra/kubernetes/README.md makes some",
    )


def _queue_state(seen: Look, queue: str, found: Json) -> None:
    conditions = found.get("status", {}).get("conditions") or []
    inactive = [c for c in conditions if c.get("type") == "Active" and c.get("status") == "False"]
    if inactive or found.get("spec", {}).get("stopPolicy", "None") != "None":
        said = inactive[0].get("message", "") if inactive else "it is stopped"
        seen.findings.unknown(
            "queue",
            f"{queue} takes no jobs now: {said}",
            f"kubectl describe localqueue {queue} -n {seen.step.namespace}",
        )
    else:
        seen.findings.ok(
            "queue", f"{queue}, of cluster queue {found.get('spec', {}).get('clusterQueue', '?')}"
        )


def _quota(seen: Look) -> None:
    from kubernetes.utils import parse_quantity

    request = seen.request
    wanted = {
        f"requests.{GPUS}": request.nodes * request.gpus_per_node,
        "requests.cpu": request.nodes * request.cpu,
        "requests.memory": request.nodes * request.memory_mib * MIB,
        "pods": request.nodes,
    }
    wanted |= {"cpu": wanted["requests.cpu"], "memory": wanted["requests.memory"]}  # other names of the same
    for quota in seen.get(seen.namespaced("resourcequotas")).get("items") or []:
        status, name = quota.get("status") or {}, quota["metadata"]["name"]
        for what, hard in ((status.get("hard") or {}) or (quota.get("spec", {}).get("hard") or {})).items():
            most, used = (
                float(parse_quantity(hard)),
                float(parse_quantity((status.get("used") or {}).get(what, "0"))),
            )
            fix = f"kubectl describe resourcequota {name} -n {seen.step.namespace}"
            if wanted.get(what, 0) > most:
                seen.findings.no(
                    "quota", f"{name} allows {hard} {what}; {_plain(what, wanted[what])} are needed", fix
                )
            elif wanted.get(what) and wanted[what] + used > most:
                seen.findings.unknown("quota", f"{name}: {what} is in use; this waits until others end", fix)


def _plain(what: str, value: float) -> str:
    return f"{value / GIB:.0f}Gi" if what.endswith("memory") else f"{value:g}"
