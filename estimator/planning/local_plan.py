"""Plans for available hardware: this machine, or the nodes of an allocation; on CPUs for a small model."""

from __future__ import annotations

from dataclasses import replace

from estimator import hardware
from estimator.engines import liger, varlen
from estimator.engines.support import refuse_gpu
from estimator.errors import CannotFit, UserError
from estimator.formatting import format_bytes, format_count, format_duration
from estimator.hardware import Gpu
from estimator.hardware.catalogue import most_driver_bytes
from estimator.job import Job, Machine, Target
from estimator.plan import Plan
from estimator.planning import reasons
from estimator.planning.assembly import assemble
from estimator.planning.candidates import percent
from estimator.planning.clusters import best_or_none
from estimator.planning.failures import smaller, with_lean_states, without_costly_options
from estimator.planning.goals import Goals
from estimator.planning.places import LARGEST_MODEL_ON_CPU
from estimator.planning.search import (
    Evidence,
    Search,
    describe_job,
    divides,
    indivisible_batch_error,
    precision_of,
)
from estimator.suggestions import Suggestion

# Maximum request of a CPU process on a cluster, which nearly every cluster can meet. General-purpose
# instances have 4 GiB per core (AWS's M family, 2025).
CORES_OF_A_PROCESS = 4
RAM_OF_A_PROCESS = 16 * 2**30
_CLUSTER = "--with kubernetes or --with batch (`finetune plan`: --no-here)"


def pod_of_cpus(processes: int) -> Machine:
    """Return the resources of one node's processes on a cluster without GPUs and with unknown nodes."""
    return Machine(
        cpu_cores=CORES_OF_A_PROCESS * processes, ram_bytes=RAM_OF_A_PROCESS * processes, disk_free_bytes=0
    )


def plan_local(job: Job, target: Target, goals: Goals, evidence: Evidence) -> Plan:
    """Plan for the available hardware. Raises CannotFit if the job does not fit or misses the deadline."""
    plan = _plan(job, target, goals, evidence)
    limit, hours = goals.deadline_hours, plan.prediction.hours
    if limit is not None and hours is None:
        basis = plan.prediction.throughput_basis
        raise CannotFit(
            f"Unknown whether {describe_place(target)} meets the deadline of {limit:g} h: {basis}.",
            example_plan=plan,
        )
    if limit is not None and hours is not None and hours > limit:
        raise CannotFit(
            f"{describe_job(job)} takes {format_duration(hours * 3600)} of {limit:g} h on "
            f"{describe_place(target)}: {percent(hours / limit - 1)} over.",
            "Train on fewer tokens, or use `finetune plan` to find other hardware.",
            example_plan=plan,
        )
    return plan


def _plan(job: Job, target: Target, goals: Goals, evidence: Evidence) -> Plan:
    machine = target.machine
    if machine is None:
        raise UserError(f"A plan for {target.kind} needs a description of the machine.")
    if target.device == "cuda" and not machine.gpus:
        raise UserError(
            "--device cuda: no NVIDIA GPU is reported by a driver here.",
            "Request nodes with GPUs from the scheduler."
            if target.kind == "allocation"
            else f"Use --device cpu, or a cluster: {_CLUSTER}.",
        )
    _check_gpu(target, machine)
    if target.gpus and not machine.gpus and target.device == "auto":
        raise UserError(
            f"--gpus {target.gpus}: {describe_place(target)} has no NVIDIA GPU reported by a driver.",
            f"Use --device cpu for {format_count(target.gpus, 'process')} on CPUs, or remove --gpus.",
        )
    if machine.gpus and target.device != "cpu":
        return _on_gpus(job, target, machine, goals, evidence)
    if target.device == "auto" and job.model.parameters > LARGEST_MODEL_ON_CPU:
        raise _cannot_fit_here(
            job,
            target,
            f"{job.model.name} has {job.model.parameters / 1e9:.1f} billion parameters, too many to train "
            "on CPUs in a useful time, and there is no GPU.",
        )
    return _on_cpu(job, target, machine, goals, evidence)


def _check_gpu(target: Target, machine: Machine) -> None:
    """Raise UserError if a requested GPU is not available here, or an instance type or cloud is requested."""
    for option, value in (("--instance-type", target.instance_type), ("--cloud", target.cloud)):
        if value is not None and target.kind == "local":
            raise UserError(
                f"{option} {value}: the plan is for this machine.",
                f"Remove it, or use a cluster: {_CLUSTER}.",
            )
    if target.gpu is None:
        return
    requested = {gpu.name for gpu in hardware.gpus_called(target.gpu)}
    names = dict.fromkeys(name for name, _ in machine.gpus)
    catalogue_gpus = {name: hardware.find_gpu_by_nvml_name(name) for name in names}
    if target.device != "cpu" and any(
        gpu is None or gpu.name in requested for gpu in catalogue_gpus.values()
    ):
        return
    present = ", ".join(names) if target.device != "cpu" else ""
    raise UserError(
        f"--gpu {target.gpu}: {describe_place(target)} has {present or 'no usable GPU'}.",
        f"Remove --gpu (resources.gpu of a settings file), or use a machine with one. `finetune plan --gpu "
        f"{target.gpu!r}` plans for it.",
    )


def _on_gpus(job: Job, target: Target, machine: Machine, goals: Goals, evidence: Evidence) -> Plan:
    nodes = target.nodes or 1
    max_gpus = len(machine.gpus) // target.nodes_per_machine
    if (target.gpus or 1) > max_gpus and target.kind == "allocation":
        raise UserError(
            f"{target.gpus} GPUs per node are requested, {describe_place(target)} has {max_gpus}.",
            "Request more from the scheduler, or fewer with --gpus.",
        )
    if (target.gpus or 1) > max_gpus:
        requested = format_count(nodes * (target.gpus or 1), "GPU")
        raise UserError(
            f"{requested} requested, this machine has {len(machine.gpus)}.",
            f"Request fewer with --gpus or --nodes, or use a cluster: {_CLUSTER}.",
        )
    counts = [target.gpus] if target.gpus else [n for n in range(max_gpus, 0, -1) if divides(job, nodes, n)]
    if not counts:
        raise indivisible_batch_error(job, nodes, f"{nodes} nodes")
    options = []
    for count in _distinct(counts, target, machine):
        name, capacity, gpu = _limits(machine.gpus[: target.nodes_per_machine * count])
        if gpu is not None:
            refuse_gpu(job, gpu)
        search = Search(job, precision_of(job, "cuda", gpu), "cuda", evidence, accepts_tight=target.tight)
        options.append((count, name, capacity, gpu, search))
    found = [(option, option[-1].best(nodes, option[0], option[2], option[3])) for option in options]
    fitting = [(option, candidate) for option, candidate in found if candidate is not None]
    if not fitting:
        shortages = [
            search.smallest_shortage(f"{nodes * count}x {name}", nodes, count, capacity, gpu)
            for count, name, capacity, gpu, search in options
        ]
        shortage = min(shortages, key=lambda shortage: shortage.over)
        error = _cannot_fit_here(
            job,
            target,
            f"{describe_job(job)} does not fit on the available GPUs: {shortage}."
            + (" The GPUs differ: CUDA_VISIBLE_DEVICES selects some." if _differ(machine) else ""),
        )
        error.shortage = shortage.reason
        raise error
    (count, name, capacity, _, search), candidate = max(
        fitting, key=lambda item: item[1].speed.tokens_per_second or 0.0
    )
    gpus = machine.gpus[: target.nodes_per_machine * count]
    lines = [
        f"{describe_place(target)}'s {len(gpus)} of {format_count(len(machine.gpus), 'GPU')} "
        f"({name}, {format_bytes(capacity)} each)"
    ]
    if _differ(machine):
        lines.append(
            f"the GPUs differ: {_describe_gpus(machine)}; the weakest of those used limits memory and speed; "
            "CUDA_VISIBLE_DEVICES selects others"
        )
    elif count < max_gpus and not target.gpus:
        lines.append(
            f"{count} of {max_gpus} GPUs, as more do not divide the batch of {job.global_batch_size}"
        )
    return assemble(
        job, target, candidate, lines + reasons.of_layout(search, candidate), (), goals.total_tokens(job)
    )


def _differ(machine: Machine) -> bool:
    return len({name for name, _ in machine.gpus}) > 1


def _limits(gpus: tuple[tuple[str, int], ...]) -> tuple[str, int, Gpu | None]:
    """Return the name, usable bytes and catalogue entry that limit a step over these GPUs.

    A step waits for the slowest GPU, and all need the same memory: one without a catalogue entry or bf16
    counts as the slowest.
    """

    def strength(item: tuple[str, int]) -> tuple[bool, bool, float, int]:
        gpu = hardware.find_gpu_by_nvml_name(item[0])
        if gpu is None:
            return False, False, 0.0, item[1]
        rate = gpu.measured_tflops or (gpu.peak_flops("bf16") or gpu.peak_flops("fp16") or 0.0) / 1e12
        return True, gpu.bf16, rate, item[1]

    name, _ = min(gpus, key=strength)
    found = {other: hardware.find_gpu_by_nvml_name(other) for other, _ in gpus}
    reserved = {other: gpu.driver_bytes if gpu is not None else None for other, gpu in found.items()}
    sizes = [size - (reserved[other] or most_driver_bytes(size)) for other, size in gpus]
    return name, min(sizes), found[name]


def _distinct(counts: list[int], target: Target, machine: Machine) -> list[int]:
    """Return the numbers of GPUs to compare: fewer only if stronger ones remain without the last."""
    per_machine = target.nodes_per_machine
    limits = [_limits(machine.gpus[: per_machine * count]) for count in counts]
    return [count for n, count in enumerate(counts) if n == 0 or limits[n] != limits[n - 1]]


def _on_cpu(job: Job, target: Target, machine: Machine, goals: Goals, evidence: Evidence) -> Plan:
    liger.refuse_cpu(job)
    varlen.refuse_cpu(job)
    nodes, processes = target.nodes or 1, target.gpus or 1
    if not divides(job, nodes, processes):
        raise indivisible_batch_error(job, nodes * processes, f"{nodes} nodes of {processes} processes")
    capacity = machine.ram_bytes // (target.nodes_per_machine * processes)
    search = Search(job, precision_of(job, "cpu", None), "cpu", evidence, accepts_tight=target.tight)
    candidate = search.best(nodes, processes, capacity, None)
    if candidate is None:
        shortage = search.smallest_shortage(
            f"{format_count(nodes * processes, 'process')}", nodes, processes, capacity, None
        )
        raise _cannot_fit_here(
            job, target, f"{describe_job(job)} does not fit in the available memory: {shortage}."
        )
    reason = "as requested" if target.device == "cpu" else "no GPU here, and the model is small"
    if goals.cluster is not None:
        reason = f"{goals.cluster.where} has no GPU, and the model is small"
    limit = f"the limit is {LARGEST_MODEL_ON_CPU / 1e9:.1f} billion parameters"
    lines = [f"on {describe_place(target)}'s CPU: {reason} ({limit})"]
    return assemble(
        job, target, candidate, lines + reasons.of_layout(search, candidate), (), goals.total_tokens(job)
    )


def _cannot_fit_here(job: Job, target: Target, problem: str) -> CannotFit:
    machine = target.machine
    suggestions: list[Suggestion] = []
    anywhere = replace(target, kind="kubernetes", nodes=None, gpus=None, device="auto", machine=None)
    cloud_plan = best_or_none(job, anywhere)
    if target.kind == "allocation":
        suggestions = list(without_costly_options(job, lambda other: _fits(other, target)))
        suggestions += smaller(job, lambda other: _fits(other, target))
        request = "Or request" if suggestions else "Request"
        return CannotFit(
            problem,
            f"{request} more or larger nodes from the scheduler: `finetune plan` shows which would fit.",
            example_plan=cloud_plan,
            suggestions=tuple(suggestions),
            available=describe(machine) if machine else "",
        )
    if target.kind != "local":
        return CannotFit(
            problem,
            "Remove --device to plan for GPUs." if cloud_plan is not None else "",
            example_plan=cloud_plan,
        )
    suggestions += without_costly_options(job, lambda other: _fits(other, target))
    suggestions += with_lean_states(job, lambda other: _fits(other, target))
    suggestions += smaller(job, lambda other: _fits(other, target))
    if cloud_plan is None:
        anywhere = replace(anywhere, gpu=None, instance_type=None, cloud=None)
        cloud_plan = best_or_none(job, anywhere)
    if cloud_plan is not None:
        suggestions.append({"with": "kubernetes"})
        if best_or_none(job, replace(anywhere, kind="batch")) is not None:
            suggestions.append({"with": "batch"})
    return CannotFit(
        problem,
        example_plan=cloud_plan,
        suggestions=tuple(suggestions),
        available=describe(machine) if machine else "",
    )


def _fits(job: Job, target: Target) -> bool:
    """Return whether a local GPU plan exists, without searching for alternatives."""
    machine = target.machine
    if machine is None or not machine.gpus:
        return False
    nodes = target.nodes or 1
    counts = [
        n for n in range(len(machine.gpus) // target.nodes_per_machine, 0, -1) if divides(job, nodes, n)
    ]
    if target.gpus:
        counts = [target.gpus] if divides(job, nodes, target.gpus) else []
    for count in _distinct(counts, target, machine):
        _, capacity, gpu = _limits(machine.gpus[: target.nodes_per_machine * count])
        search = Search(job, precision_of(job, "cuda", gpu), "cuda")
        if search.best(nodes, count, capacity, gpu) is not None:
            return True
    return False


def describe_place(target: Target) -> str:
    """Return the name of the hardware of a plan for messages."""
    return "this machine" if target.kind == "local" else "each node of this job"


def describe(machine: Machine) -> str:
    """Describe the hardware of a machine."""
    return (
        f"{_describe_gpus(machine) or 'no GPU'}, {machine.cpu_cores} CPU cores, "
        f"{format_bytes(machine.ram_bytes)} memory, {format_bytes(machine.disk_free_bytes)} free disk"
    )


def _describe_gpus(machine: Machine) -> str:
    names = [name for name, _ in machine.gpus]
    return ", ".join(
        f"{names.count(name)}x {name} of {format_bytes(dict(machine.gpus)[name])}"
        for name in dict.fromkeys(names)
    )
