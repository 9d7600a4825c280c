"""From a layout on a machine to the Plan: the request, the prediction and the reasons."""

from __future__ import annotations

from dataclasses import replace

from estimator import memory, throughput
from estimator.job import Job, Target
from estimator.plan import GIB, MIB, Plan, Prediction, Request
from estimator.planning import learning_rate
from estimator.planning.engines import setup_of
from estimator.planning.search import Candidate

SHARED_MEMORY_PER_GPU = 8 * GIB
# On a node beside its ranks: Metaflow's task with its sidecars, torchrun's agent, the profiler: 0.3 GiB in
# containers that train tiny-llama. While a checkpoint or model is sent to S3, Metaflow's workers: up to 64
# (METAFLOW_S3_WORKER_COUNT) of 27 MiB each. Without it, a container of Batch was killed in each attempt.
BESIDE_RANKS = 2 * GIB


def assemble(
    job: Job,
    target: Target,
    candidate: Candidate,
    why: list[str],
    rejected: tuple[str, ...],
    tokens: int | None = None,
) -> Plan:
    """Make the Plan of a candidate.

    ``why`` and ``rejected`` are lines for people; ``tokens`` of the whole job give its hours and its price.
    """
    setup = setup_of(job, candidate.layout)
    layout, place = candidate.layout, candidate.place
    peak = None
    if candidate.gpu is not None:
        peak = candidate.gpu.peak_flops("fp32" if layout.precision == "fp32" else "bf16")
    plan = Plan(
        model=job.model.name,
        parameters=job.model.parameters,
        method=job.method,  # type: ignore[arg-type]  # "auto" is decided before
        engine=job.engine,
        target=target.kind,
        request=_request(job, target, candidate),
        layout=layout,
        prediction=Prediction(
            memory=candidate.memory,
            flops_per_token=throughput.flops_per_token(setup),
            peak_flops_per_gpu=peak,
            tokens_per_second=candidate.speed.tokens_per_second,
            hours=candidate.hours(tokens),
            usd_per_hour=candidate.usd_per_hour,
            usd=candidate.usd(tokens),
            throughput_basis=candidate.speed.basis,
            tokens=tokens,
            mfu=candidate.speed.mfu,
            tokens_per_second_range=candidate.speed.tokens_per_second_range,
            price_kind="spot" if place is not None and place.spot else "on demand",
            price_source=place.price if place is not None else "",
        ),
        why=tuple(why),
        rejected=rejected,
        learning_rates=learning_rate.hints(job),
        task=job.task,
    )
    if plan.planned_only is None:
        return plan
    return replace(plan, why=(*plan.why, plan.planned_only))


def _request(job: Job, target: Target, candidate: Candidate) -> Request:
    layout, place = candidate.layout, candidate.place
    processes = layout.processes_per_node
    on_gpus = layout.device == "cuda"
    host, cpu = candidate.memory.host_bytes, processes
    ram = target.machine.ram_bytes if target.machine is not None else None
    if place is not None:
        share = place.allocatable * processes / place.gpus
        cpu = max(int((place.vcpu or processes) * share), 1)
        ram = place.ram_bytes
        host = int(ram * share) if ram is not None else int(host * 1.25) + BESIDE_RANKS
    elif target.machine is not None:
        cpu = max(target.machine.cpu_cores // target.sharers, 1)
        host = min(host + BESIDE_RANKS, target.machine.ram_bytes // target.sharers)
    shared = SHARED_MEMORY_PER_GPU * processes
    if ram is not None:
        shared = min(shared, ram // 4 // target.sharers)
    name = candidate.gpu.name if candidate.gpu is not None else None
    if name is None and on_gpus and target.machine is not None:
        name = target.machine.gpus[0][0]
    return Request(
        nodes=layout.nodes,
        gpus_per_node=processes if on_gpus else 0,
        gpu=name,
        cpu=cpu,
        memory_mib=-(-host // MIB),
        shared_memory_mib=shared // MIB,
        disk_mib=-(-memory.disk_bytes(setup_of(job, layout)) // MIB),
        instance_type=place.name if place is not None else None,
        cloud=place.cloud if place is not None else None,
    )
