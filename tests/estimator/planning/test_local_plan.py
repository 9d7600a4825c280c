"""Plans for the nodes that a scheduler has already given: each has a machine of its own."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from estimator import CannotFit, Job, Machine, Plan, Target, UserError, hardware, plan
from estimator.models import find
from estimator.plan import GIB
from estimator.planning.report import render

NODE = Machine(
    gpus=(("NVIDIA H100 80GB HBM3", hardware.gpu("h100-sxm").vram_bytes),) * 4,
    cpu_cores=64,
    ram_bytes=512 * GIB,
    disk_free_bytes=2048 * GIB,
)
WITHOUT_GPUS = Machine(cpu_cores=8, ram_bytes=16 * GIB, disk_free_bytes=100 * GIB)


def allocation(nodes: int, machine: Machine = NODE, **more: object) -> Target:
    return Target(kind="allocation", machine=machine, nodes=nodes, **more)  # type: ignore[arg-type]


def test_each_node_of_an_allocation_has_all_gpus_of_its_machine() -> None:
    job = Job(model=find("llama-8b"), global_batch_size=16, steps=10)
    alone = plan(job, Target(machine=NODE, nodes=2))
    given = plan(job, allocation(2))
    assert alone.request.gpus_per_node == 2, "two local nodes share this machine's four"
    assert (given.request.nodes, given.request.gpus_per_node) == (2, 4)
    assert (given.layout.world_size, given.target) == (8, "allocation")
    assert "the nodes of this job" in render(given)
    assert Plan.from_json(given.to_json()) == given


def test_each_node_of_an_allocation_has_all_memory_and_cores_of_its_machine() -> None:
    job = Job(model=find("tiny-llama"), seq_len=256, global_batch_size=4)
    chosen = plan(job, allocation(2, WITHOUT_GPUS))
    assert chosen.prediction.memory.capacity_bytes == WITHOUT_GPUS.ram_bytes
    assert chosen.request.cpu == WITHOUT_GPUS.cpu_cores


def test_a_too_small_allocation_is_refused_with_the_advice_to_request_larger_nodes() -> None:
    with pytest.raises(CannotFit, match="available GPUs") as caught:
        plan(Job(model=find("llama-70b"), global_batch_size=16), allocation(1))
    assert "--with" not in caught.value.advice
    assert re.search("(Or r|R)equest more or larger nodes", caught.value.advice)


def test_more_gpus_than_the_nodes_have_are_refused() -> None:
    with pytest.raises(UserError, match=r"8 GPUs per node are requested, each .* has 4"):
        plan(Job(model=find("llama-8b"), global_batch_size=16), allocation(2, gpus=8))


@pytest.mark.parametrize(
    ("gpu", "machine", "found"),
    [("A100", NODE, "H100 80GB HBM3"), ("h100", WITHOUT_GPUS, "no usable GPU"), ("H100", NODE, None)],
)
def test_a_gpu_that_the_machine_does_not_have_is_refused(
    gpu: str, machine: Machine, found: str | None
) -> None:
    job, target = Job(model=find("tiny-llama"), seq_len=256), allocation(1, machine, gpu=gpu)
    if found is None:
        assert plan(job, target).request.gpus_per_node > 0
        return
    with pytest.raises(UserError, match=found) as caught:
        plan(job, target)
    assert gpu in caught.value.problem


def workstation(*gpus: tuple[str, float]) -> Target:
    machine = Machine(
        gpus=tuple((f"NVIDIA GeForce {name}", int(gib * GIB)) for name, gib in gpus),
        cpu_cores=16,
        ram_bytes=64 * GIB,
        disk_free_bytes=500 * GIB,
    )
    return Target(machine=machine)


def test_methods_that_do_not_fit_are_named_with_the_memory_they_need() -> None:
    job = Job(model=find("llama-8b"), method="auto", engine="auto")
    reason = plan(job, workstation(("RTX 5070", 12))).why[0]
    memory = r"needs \S+ GiB, has \S+ GiB: \d+ % over"
    assert re.fullmatch(f"method qlora: .*; full: {memory}; lora: {memory}", reason)


def test_a_small_second_gpu_is_left_out_if_the_first_can_train_alone() -> None:
    job = Job(model=find("llama-8b"), method="lora", global_batch_size=8)
    plans = [plan(job, workstation(("RTX 4090", 24), small)) for small in (("GT 1030", 2), ("RTX 3060", 12))]
    assert [made.layout.world_size for made in plans] == [1, 1]
    assert {made.request.gpu_type for made in plans} == {"RTX 4090"}
    assert "1x NVIDIA GeForce GT 1030 of 2.00 GiB" in " ".join(plans[0].why)


def test_the_slowest_of_different_gpus_decides_the_speed_in_either_order() -> None:
    job = Job(model=find("llama-8b"), method="lora", global_batch_size=8)
    cards = (("RTX 4090", 24), ("RTX 3090", 24))
    plans = [plan(job, replace(workstation(*order), gpus=2)) for order in (cards, cards[::-1])]
    assert {made.request.gpu_type for made in plans} == {"RTX 3090"}
    assert len({made.prediction.tokens_per_second for made in plans}) == 1


def test_different_gpus_that_do_not_fit_are_refused_with_the_variable_that_selects_some() -> None:
    with pytest.raises(CannotFit, match="CUDA_VISIBLE_DEVICES"):
        plan(
            Job(model=find("llama-8b"), method="lora", global_batch_size=8),
            workstation(("GT 1030", 2), ("RTX 4090", 24)),
        )
