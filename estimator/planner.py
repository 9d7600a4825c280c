"""From a job and a place to a Plan: what fits, what of that is cheapest, and why.

A plan fits when the upper bound of its memory is within what the GPU reports. Of those that fit, the
cheapest for the whole job wins where prices and speeds are known; then the fastest, then fewer nodes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from estimator import hardware, memory, throughput
from estimator.errors import UserError
from estimator.hardware import Gpu, Instance
from estimator.job import Job, Machine, Target, nearest_multiple
from estimator.plan import (
    GIB,
    MIB,
    Device,
    Layout,
    MemoryEstimate,
    Plan,
    Prediction,
    Request,
    Sharding,
)

# Without a GPU, training a larger model than this takes days for a first result: a 0.5 B model does some
# 10 to 50 tokens/s on a laptop's cores. --device cpu overrides it.
LARGEST_MODEL_ON_CPU = 500_000_000

NODE_COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16)
LARGEST_MICRO_BATCH = 64
ALLOCATABLE = 0.9  # of a node's CPU and memory; the system and the cluster's own pods have the rest
SHARED_MEMORY_PER_GPU = 8 * GIB
CLUSTER_CLOUDS = ("aws", "gcp", "azure")  # with a managed Kubernetes
RDMA_FABRICS = ("EFA", "IB ", "RoCE", "RDMA", "GPUDirect")


class CannotFit(UserError):  # noqa: N818 - it is an answer, with a plan in it, more than an error
    """Nothing that is at hand can run the job.

    Attributes
    ----------
    wanted:
        The best plan on any machine of the catalogue, or None.
    suggestions:
        Command-line options that would work, best first.
    here:
        What there is, in words.
    """

    def __init__(
        self,
        problem: str,
        advice: str = "",
        *,
        wanted: Plan | None = None,
        suggestions: tuple[str, ...] = (),
        here: str = "",
    ) -> None:
        super().__init__(problem, advice)
        self.wanted, self.suggestions, self.here = wanted, suggestions, here

    def __reduce__(self) -> tuple[object, ...]:  # type: ignore[override]
        state = {"wanted": self.wanted, "suggestions": self.suggestions, "here": self.here}
        return type(self), (self.problem, self.advice), state


@dataclass(frozen=True, kw_only=True, slots=True)
class _Candidate:
    """One layout on one kind of machine that fits."""

    layout: Layout
    memory: MemoryEstimate
    gpu: Gpu | None
    instance: Instance | None
    speed: throughput.Speed

    @property
    def usd_per_hour(self) -> float | None:
        if self.instance is None or self.instance.usd_per_hour is None:
            return None
        return self.instance.usd_per_hour * self.layout.nodes

    @property
    def usd_per_token(self) -> float | None:
        if self.usd_per_hour is None or self.speed.tokens_per_second is None:
            return None
        return self.usd_per_hour / 3600 / self.speed.tokens_per_second

    def rank(self) -> tuple[float, ...]:
        cost, speed = self.usd_per_token, self.speed.tokens_per_second
        hourly = float("inf") if self.usd_per_hour is None else self.usd_per_hour
        return (
            cost is None,
            speed is None,
            cost if cost is not None else 0.0,
            hourly if cost is None else 0.0,
            -(speed or 0.0),
            self.layout.nodes,
            self.layout.world_size,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Miss:
    """The leanest layout on one kind of machine, which still does not fit."""

    what: str
    needs: int
    has: int

    @property
    def over(self) -> float:
        return self.needs / self.has - 1

    def __str__(self) -> str:
        return f"{self.what}: needs {gib(self.needs)}, has {gib(self.has)}: {_percent(self.over)} over"


def plan(job: Job, target: Target) -> Plan:
    """The best plan for a job on a target.

    Raises :class:`UserError` for values that can't go together, :class:`CannotFit` where nothing fits.
    """
    _check_world(job, target)
    return _plan_local(job, target) if target.kind == "local" else _plan_remote(job, target)


def gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"


# ---------------------------------------------------------------- local


def _plan_local(job: Job, target: Target) -> Plan:
    machine = target.machine
    if machine is None:
        raise UserError("A local plan needs to know the machine.")
    if target.device == "cuda" and not machine.gpus:
        raise UserError(
            "--device cuda: this machine has no NVIDIA GPU that its driver reports.",
            "Use --device cpu, or --with kubernetes or --with batch.",
        )
    if machine.gpus and target.device != "cpu":
        return _plan_local_gpus(job, target, machine)
    if target.device == "auto" and job.model.parameters > LARGEST_MODEL_ON_CPU:
        raise _cannot_fit_here(
            job,
            target,
            f"{job.model.name} has {job.model.parameters / 1e9:.1f} billion parameters, too many to train "
            "on CPUs in a useful time, and this machine has no GPU.",
        )
    return _plan_local_cpu(job, target, machine)


def _plan_local_gpus(job: Job, target: Target, machine: Machine) -> Plan:
    nodes = target.nodes or 1
    most = len(machine.gpus) // nodes
    if (target.gpus or 1) > most:
        raise UserError(
            f"{nodes} local node(s) of {target.gpus or 1} GPU(s) need {nodes * (target.gpus or 1)} GPUs, "
            f"this machine has {len(machine.gpus)}.",
            "Ask for fewer with --gpus or --nodes, or use --with kubernetes.",
        )
    counts = [target.gpus] if target.gpus else [n for n in range(most, 0, -1) if _divides(job, nodes * n)]
    if not counts:
        raise _indivisible(job, nodes, f"{nodes} nodes")
    used = machine.gpus[: nodes * counts[0]]
    name, capacity = used[0][0], min(size for _, size in used)
    known = hardware.find_gpu_by_nvml_name(name)
    searched = _Search(job, _precision(job, "cuda", known), "cuda")
    found = searched.best(nodes, counts[0], capacity, known)
    if found is None:
        miss = searched.leanest(f"{nodes * counts[0]}x {name}", nodes, counts[0], capacity)
        raise _cannot_fit_here(job, target, f"{_title(job)} does not fit on this machine's GPUs: {miss}.")
    why = [f"this machine's {nodes * counts[0]} of {len(machine.gpus)} GPU(s) ({name}, {gib(capacity)} each)"]
    if counts[0] < most and not target.gpus:
        why.append(f"{counts[0]} of {most} GPUs, as the batch of {job.global_batch} can't be divided by more")
    return _assemble(job, target, found, why + searched.reasons(found), ())


def _plan_local_cpu(job: Job, target: Target, machine: Machine) -> Plan:
    nodes, processes = target.nodes or 1, target.gpus or 1
    if not _divides(job, nodes * processes):
        raise _indivisible(job, nodes * processes, f"{nodes} nodes of {processes} processes")
    capacity = machine.ram_bytes // (nodes * processes)
    searched = _Search(job, _precision(job, "cpu", None), "cpu")
    found = searched.best(nodes, processes, capacity, None)
    if found is None:
        miss = searched.leanest(f"{nodes * processes} process(es)", nodes, processes, capacity)
        raise _cannot_fit_here(job, target, f"{_title(job)} does not fit in this machine's memory: {miss}.")
    reason = "as --device cpu says" if target.device == "cpu" else "no GPU here, and the model is small"
    why = [
        f"on this machine's CPU: {reason} (the limit is {LARGEST_MODEL_ON_CPU / 1e9:.1f} billion parameters)"
    ]
    return _assemble(job, target, found, why + searched.reasons(found), ())


def _cannot_fit_here(job: Job, target: Target, problem: str) -> CannotFit:
    machine = target.machine
    suggestions: list[str] = []
    anywhere = replace(target, kind="kubernetes", nodes=None, gpus=None, device="auto", machine=None)
    wanted = _or_none(job, anywhere)
    if wanted is None:
        anywhere = replace(anywhere, gpu=None, instance_type=None, cloud=None)
        wanted = _or_none(job, anywhere)
    if wanted is not None:
        suggestions.append("--with kubernetes")
        if _or_none(job, replace(anywhere, kind="batch")) is not None:
            suggestions.append("--with batch")
    smaller = _as_qlora(job)
    if smaller is not None and _local_fits(smaller, target):
        suggestions.append(_QLORA_OPTIONS[job.engine])
    return CannotFit(
        problem,
        "It would run with " + ", or ".join(suggestions) + "." if suggestions else "",
        wanted=wanted,
        suggestions=tuple(suggestions),
        here=describe(machine) if machine else "",
    )


# DeepSpeed has no QLoRA here (launchers/engines/deepspeed.py)
_QLORA_OPTIONS = {"torchtune": "--method qlora", "deepspeed": "--method qlora --launcher torchtune"}


def _as_qlora(job: Job) -> Job | None:
    """The same job with QLoRA on torchtune; None where there is no such thing."""
    if job.method == "qlora" or job.model.experts or job.precision == "bf16-mixed":
        return None
    return replace(job, method="qlora", engine="torchtune", zero_stage=None, offload="none")


def _local_fits(job: Job, target: Target) -> bool:
    """Whether a local GPU plan exists, without working out the alternatives of one that doesn't."""
    machine = target.machine
    if machine is None or not machine.gpus:
        return False
    nodes = target.nodes or 1
    counts = [n for n in range(len(machine.gpus) // nodes, 0, -1) if _divides(job, nodes * n)]
    count = target.gpus or next(iter(counts), 0)
    if not count or not _divides(job, nodes * count):
        return False
    known = hardware.find_gpu_by_nvml_name(machine.gpus[0][0])
    capacity = min(size for _, size in machine.gpus[: nodes * count])
    return (
        _Search(job, _precision(job, "cuda", known), "cuda").best(nodes, count, capacity, known) is not None
    )


def describe(machine: Machine) -> str:
    """What a machine has, in words."""
    names = [name for name, _ in machine.gpus]
    gpus = ", ".join(
        f"{names.count(name)}x {name} of {gib(dict(machine.gpus)[name])}" for name in dict.fromkeys(names)
    )
    return (
        f"{gpus or 'no GPU'}, {machine.cpu_cores} CPU cores, {gib(machine.ram_bytes)} memory, "
        f"{gib(machine.disk_free_bytes)} free disk"
    )


# ---------------------------------------------------------------- clusters


def _plan_remote(job: Job, target: Target) -> Plan:
    if target.device == "cpu":
        raise UserError(
            f"--device cpu: plans for {target.kind} are made for GPUs.",
            "Run it locally, or leave --device out.",
        )
    machines = _machines(job, target)
    searches: dict[str, _Search] = {}
    found: list[_Candidate] = []
    misses: list[_Miss] = []
    for item, gpu in machines:
        precision = _precision(job, "cuda", gpu)
        search = searches.setdefault(precision, _Search(job, precision, "cuda"))
        for nodes, count in _shapes(job, target, item):
            best = search.best(nodes, count, gpu.vram_bytes, gpu, item)
            if best is not None and _host_fits(best, item):
                found.append(best)
                if nodes > 1 or count == item.gpu_count:
                    break
            elif best is None:
                what = f"{nodes * count}x {gpu.name} ({_times(nodes, item.name)})"
                misses.append(search.leanest(what, nodes, count, gpu.vram_bytes))
    if not found:
        raise _cannot_fit_there(job, target, misses)
    found.sort(key=_Candidate.rank)
    best = found[0]
    search = searches[best.layout.precision]
    why = [*_why_machine(best, target, found), *search.reasons(best)]
    return _assemble(job, target, best, why, _rejected(best, found, misses))


def _machines(job: Job, target: Target) -> list[tuple[Instance, Gpu]]:
    """The catalogue's machines that the user's choices leave."""
    wanted_gpu = hardware.gpu(target.gpu) if target.gpu else None
    named = hardware.instance(target.instance_type) if target.instance_type else None
    allowed = ("aws",) if target.kind == "batch" else CLUSTER_CLOUDS
    if target.cloud:
        if target.cloud.lower() not in hardware.clouds():
            raise UserError(
                f"There is no cloud {target.cloud!r} in the instance table.",
                f"It has {', '.join(hardware.clouds())}.",
            )
        if target.kind == "batch" and target.cloud.lower() != "aws":
            raise UserError(f"--cloud {target.cloud}: AWS Batch runs on aws only.")
        allowed = (target.cloud.lower(),)
    machines = []
    for item in hardware.instances():
        gpu = hardware.gpu(item.gpu)
        if named is None and (item.cloud not in allowed or item.vcpu is None or item.ram_bytes is None):
            continue
        if named is not None and item is not named:
            continue
        if wanted_gpu is not None and gpu is not wanted_gpu:
            continue
        usable = gpu.vendor == "nvidia" and item.gpu_count > 0
        chosen = named is not None or wanted_gpu is not None or job.precision == "fp32"
        if usable and (gpu.bf16 or chosen) and (target.gpus or 1) <= item.gpu_count:
            machines.append((item, gpu))
    if not machines:
        asked = (("--cloud", target.cloud), ("--instance-type", target.instance_type), ("--gpu", target.gpu))
        wishes = [f"{name} {value}" for name, value in asked if value]
        if target.gpus:
            wishes.append(f"--gpus {target.gpus}")
        raise UserError(
            f"No machine of the instance table goes with {' and '.join(wishes) or target.kind}.",
            "Leave one of them out; estimator/data/instances.csv lists the machines.",
        )
    return machines


def _shapes(job: Job, target: Target, item: Instance) -> Iterator[tuple[int, int]]:
    """(nodes, GPUs for each node) to try on one machine type, fewest GPUs first."""
    counts = [2**power for power in range(5) if 2**power < item.gpu_count] + [item.gpu_count]
    if target.gpus:
        counts = [target.gpus]
    for nodes in [target.nodes] if target.nodes else NODE_COUNTS:
        for count in counts if nodes == 1 else counts[-1:]:
            if _divides(job, nodes * count):
                yield nodes, count


def _host_fits(candidate: _Candidate, item: Instance) -> bool:
    if item.ram_bytes is None:
        return True
    share = candidate.layout.processes_per_node / item.gpu_count
    return candidate.memory.host_bytes <= item.ram_bytes * ALLOCATABLE * share


def _why_machine(best: _Candidate, target: Target, found: list[_Candidate]) -> list[str]:
    item, gpu, layout = best.instance, best.gpu, best.layout
    if item is None or gpu is None:
        return []
    each = f"{layout.nodes} node(s) of {layout.processes_per_node}x {gpu.name}"
    if target.instance_type:
        lines = [f"{each}: {item.name}, as asked"]
    elif best.usd_per_token is not None:
        kinds = len({candidate.instance.name for candidate in found if candidate.instance})
        lines = [
            f"{each}: {item.name} is the cheapest a token of the {kinds} machine types that fit "
            f"(${best.usd_per_token * 1e6:.2f} a million tokens)"
        ]
    else:
        lines = [f"{each}: {item.name} fits; its price or speed is not known"]
    if item.usd_per_hour is not None:
        lines.append(f"price: on demand, {item.cloud} {item.region}, {item.price_date}")
    return lines


def _rejected(best: _Candidate, found: list[_Candidate], misses: list[_Miss]) -> tuple[str, ...]:
    """The nearest misses, one for each GPU type and count, and the next dearer machines that fit."""
    lines: dict[str, str] = {}
    for miss in sorted(misses, key=lambda miss: miss.over):
        lines.setdefault(miss.what.split(" (")[0], str(miss))
    near = list(lines.values())[:3]
    dearer: list[str] = []
    seen = {best.gpu.name if best.gpu else ""}
    for other in found[1:]:
        if other.gpu is None or other.instance is None or other.gpu.name in seen:
            continue
        seen.add(other.gpu.name)
        what = (
            f"{other.layout.world_size}x {other.gpu.name} "
            f"({_times(other.layout.nodes, other.instance.name)}): fits"
        )
        if other.usd_per_token is not None and best.usd_per_token is not None:
            dearer.append(f"{what}, {_percent(other.usd_per_token / best.usd_per_token - 1)} dearer a token")
        else:
            dearer.append(f"{what}; its price or speed is not known")
    return tuple(near + dearer[: 5 - len(near)])


def _cannot_fit_there(job: Job, target: Target, misses: list[_Miss]) -> CannotFit:
    nearest = min(misses, key=lambda miss: miss.over, default=None)
    problem = f"{_title(job)} fits on none of the machines asked for"
    problem += f"; nearest: {nearest}." if nearest else "."
    free = Target(kind=target.kind)
    wanted = _or_none(job, free) if target != free else None
    suggestions: list[str] = []
    if wanted is not None:
        suggestions.append(f"--nodes {wanted.request.nodes} --instance-type {wanted.request.instance_type}")
    smaller = _as_qlora(job)
    if smaller is not None and _or_none(smaller, target) is not None:
        suggestions.append(_QLORA_OPTIONS[job.engine])
    return CannotFit(
        problem,
        "It would run with " + ", or ".join(suggestions) + "." if suggestions else "",
        wanted=wanted,
        suggestions=tuple(suggestions),
        here=f"{len(_machines(job, target))} machine types that go with the options given",
    )


def _or_none(job: Job, target: Target) -> Plan | None:
    """A plan without its failure's alternatives; never recurses into them."""
    try:
        machines = _machines(job, target)
    except UserError:
        return None
    best: _Candidate | None = None
    searches: dict[str, _Search] = {}
    for item, gpu in machines:
        precision = _precision(job, "cuda", gpu)
        search = searches.setdefault(precision, _Search(job, precision, "cuda"))
        for nodes, count in _shapes(job, target, item):
            candidate = search.best(nodes, count, gpu.vram_bytes, gpu, item)
            if candidate is None or not _host_fits(candidate, item):
                continue
            if best is None or candidate.rank() < best.rank():
                best = candidate
            if nodes > 1 or count == item.gpu_count:
                break
    if best is None:
        return None
    return _assemble(job, target, best, searches[best.layout.precision].reasons(best), ())


# ---------------------------------------------------------------- layouts


class _Search:
    """Finds the best layout of one job in one precision for a given number of processes.

    Memory depends on the layout only, so each layout is worked out once for all machines.
    """

    def __init__(self, job: Job, precision: Literal["bf16", "bf16-mixed", "fp32"], device: Device) -> None:
        self.job, self.precision, self.device = job, precision, device
        self._estimates: dict[Layout, MemoryEstimate] = {}
        self._layouts: dict[tuple[int, int], list[list[Layout]]] = {}

    def best(
        self, nodes: int, processes: int, capacity: int, gpu: Gpu | None, item: Instance | None = None
    ) -> _Candidate | None:
        """The fastest layout whose upper bound fits, or None."""
        candidates = []
        for ladder in self._ladders(nodes, processes):
            fitting = (layout for layout in ladder if self.estimate(layout).upper_bytes <= capacity)
            layout = next(fitting, None)
            if layout is None:
                continue
            network = item.network_gbps if item else None
            rdma = item is not None and any(name in item.fabric for name in RDMA_FABRICS)
            speed = throughput.speed(self.job, layout, gpu, network_gbps=network, rdma=rdma)
            estimate = replace(self.estimate(layout), capacity_bytes=capacity)
            candidates.append(_Candidate(layout=layout, memory=estimate, gpu=gpu, instance=item, speed=speed))
        # Ladders come without checkpointing first and with the lowest ZeRO stage first: ties go to those
        return min(candidates, key=lambda c: -(c.speed.tokens_per_second or 0.0), default=None)

    def leanest(self, what: str, nodes: int, processes: int, capacity: int) -> _Miss:
        """The layout that needs least, as a miss."""
        needs = min(self.estimate(ladder[-1]).upper_bytes for ladder in self._ladders(nodes, processes))
        return _Miss(what=what, needs=needs, has=capacity)

    def estimate(self, layout: Layout) -> MemoryEstimate:
        if layout not in self._estimates:
            self._estimates[layout] = memory.estimate(self.job, layout)
        return self._estimates[layout]

    def _ladders(self, nodes: int, processes: int) -> list[list[Layout]]:
        """For each kind of layout, its micro batches from the largest down."""
        key = (nodes, processes)
        if key not in self._layouts:
            wanted = self.job.activation_checkpointing
            self._layouts[key] = [
                [self._layout(nodes, processes, sharding, micro, checkpointing) for micro in self._micro(key)]
                for checkpointing in ((False, True) if wanted is None else (wanted,))
                for sharding in _shardings(self.job, nodes * processes)
            ]
        return self._layouts[key]

    def _micro(self, key: tuple[int, int]) -> list[int]:
        world = key[0] * key[1]
        if self.job.micro_batch:
            return [self.job.micro_batch]
        each = self.job.global_batch // world
        return [size for size in range(min(each, LARGEST_MICRO_BATCH), 0, -1) if each % size == 0]

    def _layout(
        self, nodes: int, processes: int, sharding: Sharding, micro: int, checkpointing: bool
    ) -> Layout:
        return Layout(
            device=self.device,
            nodes=nodes,
            processes_per_node=processes,
            sharding=sharding,
            micro_batch=micro,
            accumulation=self.job.global_batch // (micro * nodes * processes),
            seq_len=self.job.seq_len,
            activation_checkpointing=checkpointing,
            precision=self.precision,
            optimizer=self.job.optimizer,
            offload=self.job.offload,
        )

    def reasons(self, chosen: _Candidate) -> list[str]:
        """Why precision, sharding, micro batch and checkpointing are as they are."""
        job, layout = self.job, chosen.layout
        if job.precision != "auto":
            precision = f"precision {layout.precision}, as asked"
        elif layout.precision == "fp32":
            precision = (
                f"precision fp32: {'CPUs' if layout.device == 'cpu' else 'this GPU'} without fast bf16"
            )
        elif layout.precision == "bf16":
            precision = "precision bf16, weights and optimizer too, as torchtune's recipes do"
        else:
            precision = "precision bf16 with fp32 master weights, as DeepSpeed does"
        lines = [precision, self._why_sharding(layout)]
        if job.micro_batch:
            micro = f"micro batch {layout.micro_batch}, as asked"
        elif layout.accumulation == 1:
            micro = f"micro batch {layout.micro_batch}: the whole batch at once fits"
        else:
            micro = f"micro batch {layout.micro_batch}: the largest that fits"
        lines.append(f"{micro} ({layout.accumulation} forward passes for each step of {job.global_batch})")
        if job.activation_checkpointing is not None:
            word = "on" if layout.activation_checkpointing else "off"
            lines.append(f"activation checkpointing {word}, as asked")
        elif not layout.activation_checkpointing:
            lines.append("no activation checkpointing: the activations fit")
        else:
            without = self.estimate(replace(layout, activation_checkpointing=False)).upper_bytes
            lines.append(
                f"activation checkpointing: without it this micro batch needs {gib(without)} of "
                f"{gib(chosen.memory.capacity_bytes or 0)}"
            )
        return lines

    def _why_sharding(self, layout: Layout) -> str:
        stage = memory.zero_stage(layout)
        if layout.sharding == "none":
            return "no sharding: one process"
        if stage is None:
            return f"FSDP: weights, gradients and optimizer divided over {layout.world_size} processes"
        if self.job.zero_stage is not None:
            return f"ZeRO stage {stage}, as asked"
        if layout.world_size == 1:
            return f"ZeRO stage {stage}: one process"
        return f"ZeRO stage {stage}: the fastest that fits; lower stages save nothing or do not fit"


def _shardings(job: Job, world: int) -> tuple[Sharding, ...]:
    if job.engine == "torchtune":
        return ("fsdp",) if world > 1 else ("none",)
    stages: tuple[Sharding, ...] = ("zero0", "zero1", "zero2", "zero3")
    if job.zero_stage is not None:
        return (stages[job.zero_stage],)
    if job.offload == "cpu":
        return ("zero2",) if world == 1 else ("zero2", "zero3")
    return ("zero0",) if world == 1 else stages[1:]


def _precision(job: Job, device: Device, gpu: Gpu | None) -> Literal["bf16", "bf16-mixed", "fp32"]:
    """The precision of the layout: the user's, or what the device and the engine do well."""
    if job.precision == "fp32":
        return "fp32"
    if job.precision == "auto" and (device == "cpu" or (gpu is not None and not gpu.bf16)):
        return "fp32"
    return "bf16" if job.engine == "torchtune" else "bf16-mixed"


# ---------------------------------------------------------------- the batch and the world


def _divides(job: Job, world: int) -> bool:
    return job.global_batch % (world * (job.micro_batch or 1)) == 0


def _check_world(job: Job, target: Target) -> None:
    """The user's nodes and GPUs must divide the batch."""
    if not target.nodes and not target.gpus:
        return
    nodes, gpus = target.nodes or 1, target.gpus or 1
    if not _divides(job, nodes * gpus):
        raise _indivisible(job, nodes * gpus, f"{nodes} node(s) of {gpus} process(es)")


def _indivisible(job: Job, world: int, what: str) -> UserError:
    step = world * (job.micro_batch or 1)
    micro = f" with micro batch {job.micro_batch}" if job.micro_batch else ""
    return UserError(
        f"A batch of {job.global_batch} can't be divided over {what}{micro}.",
        f"Nearest workable batch: {nearest_multiple(job.global_batch, step)} (any multiple of {step}).",
    )


# ---------------------------------------------------------------- the Plan


def _assemble(
    job: Job, target: Target, chosen: _Candidate, why: list[str], rejected: tuple[str, ...]
) -> Plan:
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
            flops_per_token=throughput.flops_per_token(job.model, job),
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


def _request(job: Job, target: Target, chosen: _Candidate) -> Request:
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
        cpu = min(max(target.machine.cpu_cores // layout.nodes, 1), processes)
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
        disk_mib=-(-memory.disk_bytes(job, layout) // MIB),
        instance_type=item.name if item is not None else None,
        cloud=item.cloud if item is not None else None,
    )


def _title(job: Job) -> str:
    return f"{job.model.name} ({job.method}, {job.engine}, {job.seq_len} tokens)"


def _times(nodes: int, name: str) -> str:
    return name if nodes == 1 else f"{nodes} {name}"


def _percent(value: float) -> str:
    return f"{value * 100:.1f} %" if abs(value) < 0.1 else f"{value * 100:.0f} %"
