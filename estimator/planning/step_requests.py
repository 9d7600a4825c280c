"""Resource requests of the steps of a run: training, preparation of weights and data, evaluation."""

from __future__ import annotations

from dataclasses import replace

from estimator import memory
from estimator.engines.setups import setup_of
from estimator.job import Job, Target
from estimator.memory.evaluation import inference_gpus, inference_host_bytes
from estimator.models import weight_formats
from estimator.plan import GIB, MIB, Layout, Request
from estimator.planning.candidates import Candidate

SHARED_MEMORY_PER_GPU = 8 * GIB
# Processes next to the ranks: Metaflow's task with its sidecars, torchrun's agent, the profiler: 0.3 GiB
# measured in containers that train tiny-llama. During an upload to S3, Metaflow's workers: up to 64
# (METAFLOW_S3_WORKER_COUNT) of 27 MiB each. Without this, Batch killed a container in each attempt.
MEMORY_OUTSIDE_RANKS = 2 * GIB
# A rank's own threads: Python, autograd's backward pass, NCCL's proxy, the reader of the next batch
# (torch/csrc/autograd/engine.cpp; NCCL's src/proxy.cc; launchers/dataset/batches.py)
CPU_OF_A_GPU = 4
CPU_OUTSIDE_RANKS = 2  # the task with its sidecars and the profiler; checkpoint uploads
PREPARE_CPU = 4  # cores that hash and upload files, and tokenize
PREPARE_MEMORY = 16 * GIB  # files are streamed; the dataset's rows and tokens are in memory
# The dataset as it is fetched, its rows and its tokens, five times a large set of instructions: OpenHermes
# 2.5 is 1.9 GB of JSON (huggingface.co/datasets/teknium/OpenHermes-2.5)
DATA_BYTES = 10 * GIB


def for_training(job: Job, target: Target, candidate: Candidate) -> Request:
    """Return the request of the training step, per node unless a field says otherwise."""
    layout, place = candidate.layout, candidate.place
    processes = layout.processes_per_node
    on_gpus = layout.device == "cuda"
    host, cpu = candidate.memory.host_bytes, processes
    ram = target.machine.ram_bytes if target.machine is not None else None
    if place is not None:
        cpu, ram = _cpu(candidate, processes), place.ram_bytes
        host = _memory(candidate, processes, host)
    elif target.machine is not None:
        cpu = max(target.machine.cpu_cores // target.nodes_per_machine, 1)
        host = min(host + MEMORY_OUTSIDE_RANKS, target.machine.ram_bytes // target.nodes_per_machine)
    shared = SHARED_MEMORY_PER_GPU * processes
    if ram is not None:
        shared = min(shared, ram // 4 // target.nodes_per_machine)
    name = candidate.gpu.name if candidate.gpu is not None else None
    if name is None and on_gpus and target.machine is not None:
        name = target.machine.gpus[0][0]
    return Request(
        nodes=layout.nodes,
        gpus_per_node=processes if on_gpus else 0,
        gpu_type=name,
        cpu=cpu,
        memory_mib=-(-host // MIB),
        shared_memory_mib=shared // MIB,
        disk_mib=-(-disk_of(job, target, layout) // MIB),
        instance_type=(place.name or None) if place is not None else None,
        cloud=place.cloud if place is not None else None,
        spot=place is not None and place.spot,
        gpu_assumed=place is not None and place.gpu_assumed,
    )


def disk_of(job: Job, target: Target, layout: Layout) -> int:
    """Return the disk space of training on one node, in bytes."""
    keeps_checkpoints = target.kind not in (
        "kubernetes",
        "batch",
    )  # where disk space is freed with the pod or container
    return memory.disk_bytes(setup_of(job, layout), keeps_checkpoints=keeps_checkpoints)


def for_preparation(job: Job, training: Request) -> Request:
    """Return the request of the preparation: no GPUs, and disk space for weights and data."""
    return replace(
        training,
        nodes=1,
        gpus_per_node=0,
        gpu_type=None,  # another queue than that of the GPUs
        cpu=min(training.cpu, PREPARE_CPU),
        memory_mib=min(training.memory_mib, PREPARE_MEMORY // MIB),
        shared_memory_mib=0,
        disk_mib=-(-(_files(job) + _published(job) + DATA_BYTES) // MIB),
        instance_type=None,
        spot=False,  # other nodes than those with GPUs
    )


def for_evaluation(job: Job, candidate: Candidate, training: Request) -> Request:
    """Return the request of the evaluation: one node with the fewest GPUs that hold the model.

    On CPUs, the resources of one training node. Disk space is for base, result and data.
    """
    disk = -(-((1 if job.adapter_only and job.adapters else 2) * _files(job) + DATA_BYTES) // MIB)
    place, capacity = candidate.place, candidate.memory.capacity_bytes
    if place is None or capacity is None:
        return replace(training, nodes=1, disk_mib=disk)
    copies = job.lora_experts and job.low_rank
    gpus = inference_gpus(job.model, training.gpus_per_node, capacity, job.seq_len, lora_experts=copies)
    host = inference_host_bytes(job.model, gpus, capacity, job.seq_len, lora_experts=copies)
    return replace(
        training,
        nodes=1,
        gpus_per_node=gpus,
        cpu=_cpu(candidate, gpus),
        memory_mib=-(-_memory(candidate, gpus, host) // MIB),
        shared_memory_mib=training.shared_memory_mib * gpus // training.gpus_per_node,
        disk_mib=disk,
    )


def _files(job: Job) -> int:
    """Return the bytes of the model's files: 2 per parameter."""
    return 2 * job.model.stored_parameters


def _published(job: Job) -> int:
    """Return the bytes of published files that are on disk while they are dequantized."""
    return weight_formats.file_bytes(job.model) if weight_formats.format_of(job.model) is not None else 0


def _cpu(candidate: Candidate, gpus: int) -> int:
    """Return the cores for this many GPUs of a node, at most their share.

    With an optimizer on the host, their full share.
    """
    place = candidate.place
    needs = CPU_OF_A_GPU * gpus + CPU_OUTSIDE_RANKS
    if place is None or place.vcpu is None:
        return needs
    share = max(int(place.vcpu * place.allocatable * gpus / place.gpus), 1)
    return share if candidate.layout.offload != "none" else min(needs, share)


def _memory(candidate: Candidate, gpus: int, needs: int) -> int:
    """Return the memory for this many GPUs of a node: the estimate plus a quarter, with shared memory.

    At most their share of the node, unless the estimate itself is larger.
    """
    place = candidate.place
    requested = int(needs * 1.25) + MEMORY_OUTSIDE_RANKS + SHARED_MEMORY_PER_GPU * gpus
    if place is None or place.ram_bytes is None:
        return requested
    allocatable_bytes = place.ram_bytes * place.allocatable
    return int(min(requested, max(allocatable_bytes * gpus / place.gpus, min(needs, allocatable_bytes))))
