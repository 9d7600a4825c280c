"""Complete estimate of one configuration: memory, host memory, disk, speed and price."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from estimator import calibration, hardware, memory, models, throughput
from estimator.calibration import Calibration, Correction
from estimator.cli.options import PlaceOptions, SetupOptions, bandwidth_of, methods_of, tokens_of
from estimator.cli.steps import setup_from
from estimator.errors import UserError
from estimator.hardware.catalogue import Gpu, Instance
from estimator.models import DiffusionSpec
from estimator.option_checks import check_above_zero
from estimator.plan import MemoryEstimate
from estimator.planning.places import RDMA_FABRICS
from estimator.setup import Setup
from estimator.throughput import MeasuredBandwidth, Speed


@dataclass(frozen=True, kw_only=True, slots=True)
class Site:
    """Hardware of a training step: GPU, machine, links and measurements. None: unknown."""

    gpu: Gpu | None
    instance: Instance | None  # source of price and network bandwidth
    instance_given: bool  # named by the user, or chosen by GPU and count
    network_gbps: float | None
    rdma: bool
    busbw: MeasuredBandwidth | None
    tokens: float | None
    calibration: Calibration | None
    problems: tuple[str, ...]  # warnings, one line each


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfigurationEstimate:
    """Estimate of one configuration: memory in bytes, speed, price in USD. None: unknown."""

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
        """Convert to plain values for JSON; sizes in bytes, units in the keys."""
        setup = dataclasses.asdict(self.setup)
        model = self.setup.model
        setup["model"] = model.name
        images = {"resolution": model.resolution} if isinstance(model, DiffusionSpec) else {}
        return {
            "model": {
                "name": model.name,
                "parameters": model.parameters,
                "active_parameters": model.active_parameters,
                "trainable_parameters": self.setup.trainable_parameters,
                **images,
            },
            "setup": setup,
            "gpu": self.site.gpu.name if self.site.gpu else None,
            "instance_type": self.site.instance.name if self.site.instance else None,
            "memory": {
                "categories": dict(self.memory.categories),
                "needs_bytes": self.memory.needs_bytes,
                "needs_range": self.memory.needs_range,
                "needs_basis": self.memory.needs_basis,
                "shows_bytes": self.memory.shows_bytes,
                "shows_range": self.memory.shows_range,
                "shows_basis": self.memory.shows_basis,
                "capacity_bytes": self.memory.capacity_bytes,
                "headroom_bytes": self.memory.headroom_bytes,
                "out_of_memory_risk": self.memory.out_of_memory_risk,
                "verdict": self.memory.verdict,
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
        """Convert to one flat row for CSV; sizes in bytes."""
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
            "needs_bytes": self.memory.needs_bytes,
            "needs_upper_bytes": self.memory.needs_range[1],
            "shows_bytes": self.memory.shows_bytes,
            "shows_upper_bytes": self.memory.shows_range[1],
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
    """Context in which the catalogue includes the user's ``file`` of GPUs and instance types.

    None: the default catalogue. Raises UserError for a file that cannot be read.
    """
    if file is None:
        yield
        return
    with hardware.using(hardware.catalogue(file)):
        yield


def estimate_configuration(options: SetupOptions, place: PlaceOptions) -> ConfigurationEstimate:
    """Estimate the configuration described by command-line options.

    Raises UserError for unknown and for contradictory values.
    """
    instance = hardware.instance(place.instance_type) if place.instance_type else None
    gpus = options.gpus if options.gpus is not None else (instance.gpu_count if instance else 1)
    model = models.resolve(options.model).spec
    gpu_name = instance.gpu if instance else place.gpu
    gpu = hardware.gpu(gpu_name) if gpu_name else None
    methods = methods_of(options) if options.method == "auto" else (options.method,)
    for method in methods:  # the first that fits, otherwise the last
        setup = setup_from(dataclasses.replace(options, method=method), model, gpus, gpu)
        result = estimate_setup(setup, site_of(place, setup, instance))
        if result.memory.fits is not False:
            break
    return result


def estimate_setup(setup: Setup, site: Site) -> ConfigurationEstimate:
    """Estimate memory, disk, speed and price of one training step on given hardware."""
    gpu, machine = site.gpu, site.instance
    capacity = gpu.usable_bytes if gpu and setup.device == "cuda" else None
    estimate = memory.estimate(setup, capacity_bytes=capacity)
    name = gpu.name if gpu else None
    correction = site.calibration.of(setup, name) if site.calibration else None
    speed = throughput.speed(setup, gpu, network_gbps=site.network_gbps, rdma=site.rdma, busbw=site.busbw)
    if gpu is None and setup.device == "cuda":
        speed = Speed(None, "no GPU is named")
    if site.calibration is not None:
        speed = site.calibration.corrected_speed(speed, setup, name)
    hourly, basis = _price(site, setup)
    cost = throughput.cost(site.tokens or 0.0, speed, hourly)
    shared = memory.shared_memory_bytes(setup)
    if machine is not None and machine.ram_bytes is not None:
        shared = min(shared, machine.ram_bytes // 4)
    return ConfigurationEstimate(
        setup=setup,
        site=site,
        memory=calibration.apply(estimate, correction) if correction else estimate,
        correction=correction,
        disk_bytes=memory.disk_bytes(setup),
        shared_memory_bytes=shared,
        speed=speed,
        usd_per_hour=hourly,
        price_basis=basis,
        hours=cost.hours if site.tokens else None,
        usd=cost.usd if site.tokens else None,
    )


def site_of(place: PlaceOptions, setup: Setup, instance: Instance | None) -> Site:
    """Look up the GPU and instance type of the options. ``instance``: that of ``--instance-type``, if any.

    If only a GPU is named, the cheapest instance type with the GPU count of a node of the step is used.
    Raises UserError if GPU, instance type and number of processes contradict each other.
    """
    if place.network_gbps is not None:
        check_above_zero("network_gbps", place.network_gbps, "Gbit/s of a node")
    hardware_name = place.gpu or place.instance_type
    if hardware_name and setup.device == "cpu":
        raise UserError(f"--device cpu and {hardware_name} contradict each other.", "Remove one of them.")
    gpu = hardware.gpu(place.gpu) if place.gpu and instance is None else None
    if instance is not None:
        if place.gpu and instance.gpu not in {item.name for item in hardware.gpus_called(place.gpu)}:
            raise UserError(
                f"--gpu {place.gpu} is not the GPU of --instance-type {instance.name}, "
                f"which has {instance.gpu}.",
                "Remove one of them.",
            )
        if not instance.gpu_count:
            raise UserError(
                f"{instance.name} has only a share of one {instance.gpu}, which training cannot use."
            )
        if setup.processes_per_node > instance.gpu_count:
            raise UserError(
                f"--gpus {setup.processes_per_node}: {instance.name} has {instance.gpu_count}.",
                "Request fewer with --gpus, or several nodes with --nodes.",
            )
        gpu = hardware.gpu(instance.gpu)
    machine = instance or (_cheapest_machine(gpu, setup) if gpu else None)
    corrections, problems = calibration.load() if place.calibration else (None, ())
    network, rdma = place.network_gbps, place.rdma
    if machine is not None and network is None:
        network = machine.network_gbps
    if rdma is None:
        rdma = machine is not None and any(name in machine.fabric for name in RDMA_FABRICS)
    return Site(
        gpu=gpu,
        instance=machine,
        instance_given=instance is not None,
        network_gbps=network,
        rdma=rdma,
        busbw=bandwidth_of(place.busbw_intra, place.busbw_inter),
        tokens=tokens_of(place.tokens) if place.tokens else None,
        calibration=corrections,
        problems=problems,
    )


def _cheapest_machine(gpu: Gpu, setup: Setup) -> Instance | None:
    """Return the cheapest instance type with a price and exactly these GPUs, or None."""
    machines = [
        item
        for item in hardware.instances()
        if item.gpu == gpu.name and item.gpu_count == setup.processes_per_node and item.usd_per_hour
    ]
    return min(machines, key=lambda item: item.usd_per_hour or 0.0, default=None)


def _price(site: Site, setup: Setup) -> tuple[float | None, str]:
    machine = site.instance
    if machine is None:
        if site.gpu is None:
            return None, "no GPU is named"
        return None, f"no instance type with {setup.processes_per_node}x {site.gpu.name} has a price"
    if machine.usd_per_hour is None:
        return None, f"{machine.name} has no price"
    choice = "" if site.instance_given else ", the cheapest one listed"
    price_basis = (
        f"{machine.price_region or 'region unknown'}, prices of {machine.price_day or 'an unknown date'}"
    )
    basis = f"{setup.nodes}x {machine.name} ({machine.cloud}{choice}), on demand, {price_basis}"
    return setup.nodes * machine.usd_per_hour, basis
