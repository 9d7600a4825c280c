"""From a layout on a machine to the Plan: the request, the prediction and the reasons."""

from __future__ import annotations

from estimator import memory, throughput
from estimator.engines import setup_of
from estimator.job import Job, Target
from estimator.plan import GIB, MIB, Plan, Prediction, Request
from estimator.search import Candidate

ALLOCATABLE = 0.9  # of a node's CPU and memory; the system and the cluster's own pods have the rest
SHARED_MEMORY_PER_GPU = 8 * GIB


def assemble(job: Job, target: Target, chosen: Candidate, why: list[str], rejected: tuple[str, ...]) -> Plan:
    setup = setup_of(job, chosen.layout)
    layout, speed = chosen.layout, chosen.speed.tokens_per_second
    hours = None
    if speed is not None and job.steps is not None:
        hours = job.steps * job.tokens_per_step / speed / 3600
    hourly = chosen.usd_per_hour
    peak = None
    if chosen.gpu is not None:
        peak = chosen.gpu.peak_flops("fp32" if layout.precision == "fp32" else "bf16")
    return Plan(
        model=job.model.name,
        parameters=job.model.parameters,
        method=job.method,
        engine=job.engine,
        target=target.kind,
        request=_request(job, target, chosen),
        layout=layout,
        prediction=Prediction(
            memory=chosen.memory,
            flops_per_token=throughput.flops_per_token(setup),
            peak_flops_per_gpu=peak,
            tokens_per_second=speed,
            hours=hours,
            usd_per_hour=hourly,
            usd=None if hours is None or hourly is None else hours * hourly,
            throughput_basis=chosen.speed.basis,
        ),
        why=tuple(why),
        rejected=rejected,
    )


def _request(job: Job, target: Target, chosen: Candidate) -> Request:
    layout, item = chosen.layout, chosen.instance
    processes = layout.processes_per_node
    on_gpus = layout.device == "cuda"
    host, cpu = chosen.memory.host_bytes, processes
    ram = target.machine.ram_bytes if target.machine is not None else None
    if item is not None:
        share = ALLOCATABLE * processes / item.gpu_count
        cpu = max(int((item.vcpu or processes) * share), 1)
        ram = item.ram_bytes
        host = int(ram * share) if ram is not None else int(host * 1.25)
    elif target.machine is not None:
        cpu = max(target.machine.cpu_cores // layout.nodes, 1)
        host = min(host, target.machine.ram_bytes // layout.nodes)
    shared = SHARED_MEMORY_PER_GPU * processes
    if ram is not None:
        shared = min(shared, ram // 4 // layout.nodes if item is None else ram // 4)
    name = chosen.gpu.name if chosen.gpu is not None else None
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
        instance_type=item.name if item is not None else None,
        cloud=item.cloud if item is not None else None,
    )
