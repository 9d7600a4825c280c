"""One configuration's whole answer: memory, host, disk, speed, price. What `estimate` and `explain` show."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from estimator import calibration, hardware, memory, models, throughput
from estimator.calibration import Calibration, Correction
from estimator.cli.options import PlaceOptions, SetupOptions, tokens_of
from estimator.cli.steps import setup_from
from estimator.errors import UserError
from estimator.hardware.catalogue import Gpu, Instance
from estimator.plan import MemoryEstimate
from estimator.planning.places import RDMA_FABRICS
from estimator.setup import Setup
from estimator.throughput import MeasuredBandwidth, Speed


@dataclass(frozen=True, kw_only=True, slots=True)
class Site:
    """What the step runs on; None is not known."""

    gpu: Gpu | None
    instance: Instance | None  # whose price and network are taken
    instance_given: bool  # by the user, or found by GPU and number
    network_gbps: float | None
    rdma: bool
    busbw: MeasuredBandwidth | None
    tokens: float | None
    calibration: Calibration | None
    problems: tuple[str, ...]  # what could not be used, a line each


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """None is not known."""

    setup: Setup
    site: Site
    memory: MemoryEstimate
    correction: Correction | None
    disk_bytes: int  # of one node
    shared_memory_bytes: int  # of one node
    speed: Speed
    usd_per_hour: float | None  # of all nodes
    price_basis: str
    hours: float | None
    usd: float | None

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; sizes in bytes."""
        setup = dataclasses.asdict(self.setup)
        setup["model"] = self.setup.model.name
        return {
            "model": {
                "name": self.setup.model.name,
                "parameters": self.setup.model.parameters,
                "active_parameters": self.setup.model.active_parameters,
                "trainable_parameters": self.setup.trainable_parameters,
            },
            "setup": setup,
            "gpu": self.site.gpu.name if self.site.gpu else None,
            "instance_type": self.site.instance.name if self.site.instance else None,
            "memory": {
                "categories": dict(self.memory.categories),
                "likely_bytes": self.memory.likely_bytes,
                "upper_bytes": self.memory.upper_bytes,
                "capacity_bytes": self.memory.capacity_bytes,
                "fits": self.memory.fits,
                "basis": self.memory.basis,
            },
            "calibration": None if self.correction is None else dataclasses.asdict(self.correction),
            "node": {
                "host_bytes": self.memory.host_bytes,
                "shared_memory_bytes": self.shared_memory_bytes,
                "disk_bytes": self.disk_bytes,
            },
            "speed": {
                "tokens_per_second": self.speed.tokens_per_second,
                "tokens_per_second_range": self.speed.tokens_per_second_range,
                "mfu": self.speed.mfu,
                "step_seconds": self.speed.step_seconds,
                "basis": self.speed.basis,
            },
            "price": {
                "usd_per_hour": self.usd_per_hour,
                "basis": self.price_basis,
                "tokens": self.site.tokens,
                "hours": self.hours,
                "usd": self.usd,
            },
        }

    def to_row(self) -> dict[str, Any]:
        """One row of CSV."""
        setup, speed = self.setup, self.speed
        return {
            "model": setup.model.name,
            "engine": setup.engine,
            "method": calibration.method_of(setup),
            "gpu": self.site.gpu.name if self.site.gpu else None,
            "processes": setup.world_size,
            "micro_batch_size": setup.micro_batch_size,
            "seq_len": setup.seq_len,
            **{f"{name.replace(' ', '_')}_bytes": size for name, size in self.memory.categories},
            "likely_bytes": self.memory.likely_bytes,
            "upper_bytes": self.memory.upper_bytes,
            "capacity_bytes": self.memory.capacity_bytes,
            "host_bytes": self.memory.host_bytes,
            "disk_bytes": self.disk_bytes,
            "tokens_per_second": speed.tokens_per_second,
            "mfu": speed.mfu,
            "usd_per_hour": self.usd_per_hour,
            "hours": self.hours,
            "usd": self.usd,
        }


@contextlib.contextmanager
def catalogue(file: Path | None) -> Iterator[None]:
    """The GPUs and machines of the tables, with the user's own file over them."""
    if file is None:
        yield
        return
    with hardware.using(hardware.catalogue(file)):
        yield


def answer(wanted: SetupOptions, where: PlaceOptions) -> Answer:
    """Estimate one configuration; raises UserError for a value that can't be used."""
    item = hardware.instance(where.instance_type) if where.instance_type else None
    gpus = wanted.gpus if wanted.gpus is not None else (item.gpu_count if item else 1)
    setup = setup_from(wanted, models.resolve(wanted.model), gpus)
    return answer_of(setup, site_of(where, setup, item))


def answer_of(setup: Setup, site: Site) -> Answer:
    gpu, machine = site.gpu, site.instance
    capacity = gpu.vram_bytes if gpu and setup.device == "cuda" else None
    estimate = memory.estimate(setup, capacity_bytes=capacity)
    name = gpu.name if gpu else None
    found = site.calibration.of(setup, name) if site.calibration else None
    speed = throughput.speed(setup, gpu, network_gbps=site.network_gbps, rdma=site.rdma, busbw=site.busbw)
    if gpu is None and setup.device == "cuda":
        speed = Speed(None, "no GPU is named")
    hourly, basis = _price(site, setup)
    cost = throughput.cost(site.tokens or 0.0, speed, hourly)
    shared = memory.shared_memory_bytes(setup)
    if machine is not None and machine.ram_bytes is not None:
        shared = min(shared, machine.ram_bytes // 4)
    return Answer(
        setup=setup,
        site=site,
        memory=calibration.apply(estimate, found) if found else estimate,
        correction=found,
        disk_bytes=memory.disk_bytes(setup),
        shared_memory_bytes=shared,
        speed=speed,
        usd_per_hour=hourly,
        price_basis=basis,
        hours=cost.hours if site.tokens else None,
        usd=cost.usd if site.tokens else None,
    )


def site_of(where: PlaceOptions, setup: Setup, item: Instance | None) -> Site:
    """The GPU and the machine that the options name.

    Where only a GPU is named: the cheapest machine that has as many of it as each node of the step.
    """
    if where.network_gbps is not None and where.network_gbps <= 0:
        raise UserError(f"--network-gbps {where.network_gbps:g} must be above 0.")
    named = where.gpu or where.instance_type
    if named and setup.device == "cpu":
        raise UserError(f"--device cpu and {named} contradict each other.", "Leave one of them out.")
    gpu = hardware.gpu(where.gpu) if where.gpu else None
    if item is not None:
        if gpu is not None and gpu.name != item.gpu:
            raise UserError(
                f"--gpu {where.gpu} is not the GPU of --instance-type {item.name}, which has {item.gpu}.",
                "Leave one of them out.",
            )
        if not item.gpu_count:
            raise UserError(f"{item.name} has only a share of one {item.gpu}, which training can't use.")
        if setup.processes_per_node > item.gpu_count:
            raise UserError(
                f"--gpus {setup.processes_per_node}: {item.name} has {item.gpu_count}.",
                "Ask for fewer with --gpus, or for several machines with --nodes.",
            )
        gpu = hardware.gpu(item.gpu)
    machine = item or (_machine(gpu, setup) if gpu else None)
    known, problems = calibration.load() if where.calibration else (None, ())
    network, rdma = where.network_gbps, where.rdma
    if machine is not None and network is None:
        network = machine.network_gbps
    if rdma is None:
        rdma = machine is not None and any(name in machine.fabric for name in RDMA_FABRICS)
    return Site(
        gpu=gpu,
        instance=machine,
        instance_given=item is not None,
        network_gbps=network,
        rdma=rdma,
        busbw=_bandwidth(where),
        tokens=tokens_of(where.tokens) if where.tokens else None,
        calibration=known,
        problems=problems,
    )


def _bandwidth(where: PlaceOptions) -> MeasuredBandwidth | None:
    measured = {"--busbw-intra": where.busbw_intra, "--busbw-inter": where.busbw_inter}
    for name, value in measured.items():
        if value is not None and value <= 0:
            raise UserError(f"{name} {value:g} must be above 0 GB/s.")
    if not any(measured.values()):
        return None
    return MeasuredBandwidth(
        intra_node_gbytes_per_s=where.busbw_intra,
        inter_node_gbytes_per_s=where.busbw_inter,
        source="given by --busbw-intra and --busbw-inter",
        date=datetime.date.today().isoformat(),
    )


def _machine(gpu: Gpu, setup: Setup) -> Instance | None:
    """The cheapest priced machine with exactly these GPUs."""
    same = [
        item
        for item in hardware.instances()
        if item.gpu == gpu.name and item.gpu_count == setup.processes_per_node and item.usd_per_hour
    ]
    return min(same, key=lambda item: item.usd_per_hour or 0.0, default=None)


def _price(site: Site, setup: Setup) -> tuple[float | None, str]:
    machine = site.instance
    if machine is None:
        if site.gpu is None:
            return None, "no GPU is named"
        return None, f"no machine with {setup.processes_per_node}x {site.gpu.name} has a sourced price"
    if machine.usd_per_hour is None:
        return None, f"{machine.name} has no sourced price"
    how = "" if site.instance_given else ", the cheapest that is listed"
    when = f"{machine.region or 'region unknown'}, prices of {machine.price_date or 'an unknown date'}"
    basis = f"{setup.nodes}x {machine.name} ({machine.cloud}{how}), on demand, {when}"
    return setup.nodes * machine.usd_per_hour, basis
