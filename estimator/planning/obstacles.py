"""Obstacles to a run on suitable nodes of a cluster: a quota, a taint, unknown instance types."""

from __future__ import annotations

from dataclasses import replace

from estimator.errors import UserError
from estimator.formatting import format_count
from estimator.hardware.cluster import Cluster, ClusterNodes
from estimator.hardware.cluster.nodes import GPUS
from estimator.hardware.cluster.taints import toleration_option
from estimator.job import Job, Target
from estimator.plan import MIB, Plan
from estimator.planning import planner
from estimator.planning.goals import Goals


def explain(error: UserError, job: Job, target: Target, cluster: Cluster) -> UserError:
    """Explain why a job has no plan on a cluster; returns ``error`` if there is no obstacle.

    ``cluster``: including nodes with untolerated taints.
    """
    unlimited = _plan_or_none(job, target, replace(cluster.usable, quotas=()))
    if unlimited is not None:
        return _quota_error(error, unlimited, cluster)
    tainted_plan = _plan_or_none(job, target, cluster)
    if tainted_plan is None:
        return _unknown_type_error(error, job, target, cluster)
    return _taint_error(
        tainted_plan, [nodes for nodes in nodes_of(tainted_plan, cluster) if nodes.untolerated_taints]
    )


def _plan_or_none(job: Job, target: Target, cluster: Cluster) -> Plan | None:
    try:
        return planner.plan(job, target, Goals(cluster=cluster))
    except UserError:
        return None


def nodes_of(plan: Plan, cluster: Cluster) -> tuple[ClusterNodes, ...]:
    """Return the cluster's nodes of the plan's instance type."""
    request = plan.request
    return tuple(
        nodes
        for nodes in cluster.nodes
        if (nodes.instance.name, nodes.gpu.name) == (request.instance_type, request.gpu_type)
    )


def taints_of(plan: Plan, cluster: Cluster) -> tuple[str, ...]:
    """Return all taints of a plan's nodes if the run's pods do not tolerate one of them, otherwise none."""
    kinds = nodes_of(plan, cluster)
    if not kinds or any(not nodes.untolerated_taints for nodes in kinds):
        return ()
    return kinds[0].taints


def _unknown_type_error(error: UserError, job: Job, target: Target, cluster: Cluster) -> UserError:
    """Build the error for node groups without nodes, whose instance type is unknown."""
    guesses = [replace(nodes, guessed=False) for nodes in cluster.nodes if nodes.guessed]
    plan = _plan_or_none(job, target, replace(cluster, nodes=tuple(guesses))) if guesses else None
    if plan is None:
        return error
    groups = ", ".join(dict.fromkeys(nodes.added_by for nodes in guesses))
    return UserError(
        f"No known node of {cluster.where} fits {job.model.name} ({plan.method}); "
        f"{groups} may add nodes of an unknown instance type.",
        f"If they are of a suitable type, name it: --instance-type {plan.request.instance_type}.",
    )


def _quota_error(error: UserError, plan: Plan, cluster: Cluster) -> UserError:
    request = plan.request
    needs = {
        GPUS: request.nodes * request.gpus_per_node,
        "cpu": request.nodes * request.cpu,
        "memory": request.nodes * request.memory_mib * MIB,
    }
    short = [quota for quota in cluster.quotas if needs.get(quota.resource, 0) > quota.limit]
    if not short:
        return error
    quota = min(short, key=lambda quota: quota.limit / needs[quota.resource])
    machines = f"{format_count(request.nodes, 'node')} of {request.gpus}"
    return UserError(
        f"ResourceQuota {quota.name} allows {quota.amount(quota.limit)} {quota.key} "
        f"({quota.amount(quota.used)} of them in use); {plan.model} ({plan.method}) needs "
        f"{quota.amount(needs[quota.resource])}: {machines}.",
        f"Request a higher quota, or train with fewer resources. {error.advice}".strip(),
    )


def _taint_error(plan: Plan, kinds: list[ClusterNodes]) -> UserError:
    first = kinds[0]
    names = [name for nodes in kinds for name in nodes.names] or [nodes.added_by for nodes in kinds]
    suffix = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return UserError(
        f"The nodes that fit {plan.model} ({plan.method}) have the untolerated taint "
        f"{', '.join(first.untolerated_taints)}: "
        f"{first.instance.gpu_count}x {first.gpu.name} of {', '.join(names[:4])}{suffix}.",
        f"If the run may use them, tolerate the taint: {toleration_option(first.taints)}",
    )
