"""The cheapest machine for sizes."""

from __future__ import annotations

import csv
from datetime import date

import pytest

from estimator import hardware
from estimator.errors import UserError
from estimator.job import Machine, Target
from estimator.planning.goals import Goals
from estimator.rightsizing.machines import CPU_MACHINES, Needs, choose_machine, usd_per_hour
from estimator.rightsizing.usage import Sizes

GIB = 2**30
AWS = Target(kind="batch")


def test_the_cheapest_machine_with_the_required_resources_is_chosen() -> None:
    needs = Needs(gpus=1, gpu_memory_bytes=40 * GIB, memory_mib=20 * 1024)
    chosen = choose_machine(needs, AWS, Goals())
    gpu = hardware.gpu(chosen.gpu_type or "")
    assert gpu.usable_bytes >= 40 * GIB
    price = hardware.instance(chosen.instance_type or "").usd_per_hour
    others = [
        item.usd_per_hour
        for item in hardware.instances()
        if item.cloud == "aws"
        and item.usd_per_hour
        and item.gpu_count >= 1
        and hardware.gpu(item.gpu).usable_bytes >= 40 * GIB
        and (item.ram_bytes or 0) * 0.9 >= 20 * GIB
    ]
    assert price == min(others)


def test_a_requested_gpu_is_used_and_impossible_needs_are_refused() -> None:
    assert choose_machine(Needs(gpus=1), Target(kind="kubernetes", gpu="A10G"), Goals()).gpu_type == "A10G"
    with pytest.raises(UserError, match="64x GPU"):
        choose_machine(Needs(gpus=64), AWS, Goals())


def test_a_local_machine_without_the_required_gpus_is_refused() -> None:
    machine = Machine(gpus=(("NVIDIA L4", 24 * GIB),), cpu_cores=8, ram_bytes=32 * GIB, disk_free_bytes=GIB)
    here = Target(kind="local", machine=machine)
    assert choose_machine(Needs(gpus=1), here, Goals()).gpu_type == "L4"
    with pytest.raises(UserError, match=r"has 1x L4, and the step asks for 2x GPU"):
        choose_machine(Needs(gpus=2), here, Goals())


def test_without_gpus_the_sizes_alone_are_requested() -> None:
    chosen = choose_machine(Needs(memory_mib=40_960), AWS, Goals())
    assert (chosen.gpus_per_node, chosen.cpu, chosen.memory_mib) == (0, 1, 40_960)
    assert chosen.instance_type is None


def test_the_price_follows_the_scarcest_size() -> None:
    assert usd_per_hour(Sizes(cpu=2, memory_mib=4096)) == pytest.approx(0.085)
    assert usd_per_hour(Sizes(cpu=1, memory_mib=16_384)) == pytest.approx(0.126)
    assert usd_per_hour(Sizes()) is None
    assert usd_per_hour(Sizes(gpus=1, gpu_type="a GPU that nobody knows")) is None


def test_every_cpu_machine_has_a_source_a_day_and_a_possible_price() -> None:
    with CPU_MACHINES.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        assert row["source"]
        assert date.fromisoformat(row["date"])
        assert 0.02 < float(row["usd_per_hour"]) / int(row["cpu"]) < 0.2
        assert 1 <= float(row["memory_gib"]) / int(row["cpu"]) <= 16
