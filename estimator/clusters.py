"""Plans for Kubernetes and AWS Batch: which of the catalogue's machines, and how many."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from estimator import hardware
from estimator.assembly import ALLOCATABLE, assemble
from estimator.errors import CannotFit, UserError
from estimator.hardware import Gpu, Instance
from estimator.job import Job, Target
from estimator.plan import Plan
from estimator.search import Candidate, Miss, Search, divides, percent, precision_of, title

NODE_COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16)
CLUSTER_CLOUDS = ("aws", "gcp", "azure")  # with a managed Kubernetes

# DeepSpeed has no QLoRA here (launchers/engines/deepspeed.py)
QLORA_OPTIONS = {"torchtune": "--method qlora", "deepspeed": "--method qlora --launcher torchtune"}


def as_qlora(job: Job) -> Job | None:
    """The same job with QLoRA on torchtune; None where there is no such thing."""
    if job.method == "qlora" or job.model.experts or job.precision == "bf16-mixed":
        return None
    return replace(job, method="qlora", engine="torchtune", zero_stage=None, offload="none")


def plan_remote(job: Job, target: Target) -> Plan:
    if target.device == "cpu":
        raise UserError(
            f"--device cpu: plans for {target.kind} are made for GPUs.",
            "Run it locally, or leave --device out.",
        )
    machines = _machines(job, target)
    searches: dict[str, Search] = {}
    found: list[Candidate] = []
    misses: list[Miss] = []
    for item, gpu in machines:
        precision = precision_of(job, "cuda", gpu)
        search = searches.setdefault(precision, Search(job, precision, "cuda"))
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
    found.sort(key=Candidate.rank)
    best = found[0]
    search = searches[best.layout.precision]
    why = [*_why_machine(best, target, found), *search.reasons(best)]
    return assemble(job, target, best, why, _rejected(best, found, misses))


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
            if divides(job, nodes * count):
                yield nodes, count


def _host_fits(candidate: Candidate, item: Instance) -> bool:
    if item.ram_bytes is None:
        return True
    share = candidate.layout.processes_per_node / item.gpu_count
    return candidate.memory.host_bytes <= item.ram_bytes * ALLOCATABLE * share


def _why_machine(best: Candidate, target: Target, found: list[Candidate]) -> list[str]:
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


def _rejected(best: Candidate, found: list[Candidate], misses: list[Miss]) -> tuple[str, ...]:
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
            dearer.append(f"{what}, {percent(other.usd_per_token / best.usd_per_token - 1)} dearer a token")
        else:
            dearer.append(f"{what}; its price or speed is not known")
    return tuple(near + dearer[: 5 - len(near)])


def _cannot_fit_there(job: Job, target: Target, misses: list[Miss]) -> CannotFit:
    nearest = min(misses, key=lambda miss: miss.over, default=None)
    problem = f"{title(job)} fits on none of the machines asked for"
    problem += f"; nearest: {nearest}." if nearest else "."
    free = Target(kind=target.kind)
    wanted = best_or_none(job, free) if target != free else None
    suggestions: list[str] = []
    if wanted is not None:
        suggestions.append(f"--nodes {wanted.request.nodes} --instance-type {wanted.request.instance_type}")
    smaller = as_qlora(job)
    if smaller is not None and best_or_none(smaller, target) is not None:
        suggestions.append(QLORA_OPTIONS[job.engine])
    return CannotFit(
        problem,
        "It would run with " + ", or ".join(suggestions) + "." if suggestions else "",
        wanted=wanted,
        suggestions=tuple(suggestions),
        here=f"{len(_machines(job, target))} machine types that go with the options given",
    )


def best_or_none(job: Job, target: Target) -> Plan | None:
    """A plan without its failure's alternatives; never recurses into them."""
    try:
        machines = _machines(job, target)
    except UserError:
        return None
    best: Candidate | None = None
    searches: dict[str, Search] = {}
    for item, gpu in machines:
        precision = precision_of(job, "cuda", gpu)
        search = searches.setdefault(precision, Search(job, precision, "cuda"))
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
    return assemble(job, target, best, searches[best.layout.precision].reasons(best), ())


def _times(nodes: int, name: str) -> str:
    return name if nodes == 1 else f"{nodes} {name}"
