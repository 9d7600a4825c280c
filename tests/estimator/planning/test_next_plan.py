"""After a plan that ran out of memory: what the next attempt is to do, in which order."""

from __future__ import annotations

from dataclasses import replace

import pytest

from estimator import hardware
from estimator.job import Job, Machine, Target
from estimator.models import find
from estimator.plan import GIB, Plan
from estimator.planning.next_plan import NextPlan, after_out_of_memory
from estimator.planning.planner import plan

LLAMA = find("llama-8b")


def job(**changes: object) -> Job:
    return Job(**{"model": LLAMA, "global_batch_size": 64, "seq_len": 2048, **changes})  # type: ignore[arg-type]


def planned(wanted: Job, **target: object) -> Plan:
    return plan(wanted, Target(kind="kubernetes", **{"gpu": "h100-sxm", "nodes": 1, "gpus": 8, **target}))  # type: ignore[arg-type]


def chain(wanted: Job, made: Plan, **options: bool) -> list[NextPlan]:
    """Every next plan until there is none."""
    found = []
    for attempt in range(50):
        following = after_out_of_memory(made, wanted, attempt=attempt, **options)
        if following is None:
            return found
        found.append(following)
        made = following.plan
    raise AssertionError("it never ends")


def test_the_first_retry_halves_the_micro_batch_and_keeps_the_global_batch() -> None:
    requested = job()
    chosen = planned(requested)
    following = after_out_of_memory(chosen, requested, attempt=0)
    before, after = chosen.layout, following.plan.layout
    assert before.micro_batch_size >= 2
    assert after.micro_batch_size <= before.micro_batch_size // 2
    assert after.global_batch_size == before.global_batch_size == 64
    assert (
        replace(after, micro_batch_size=before.micro_batch_size, accumulation=before.accumulation) == before
    )
    assert following.change.startswith(f"micro batch {before.micro_batch_size} -> {after.micro_batch_size}")


@pytest.mark.parametrize("engine", ["torchtune", "deepspeed"])
@pytest.mark.parametrize("method", ["full", "lora"])
def test_every_next_plan_needs_less_memory_or_has_a_larger_gpu(engine: str, method: str) -> None:
    requested = job(engine=engine, method=method)
    chosen = planned(requested)
    for following in chain(requested, chosen):
        before, after = chosen.prediction.memory, following.plan.prediction.memory
        if following.needs_other_machine:
            assert following.plan.layout == chosen.layout
            assert (
                hardware.gpu(following.plan.request.gpu_type or "").vram_bytes
                > hardware.gpu(chosen.request.gpu_type or "").vram_bytes
            )
        else:
            assert after.needs_bytes < before.needs_bytes
            assert following.plan.request == chosen.request
        layout = following.plan.layout
        assert (layout.nodes, layout.processes_per_node) == (1, 8)
        assert layout.global_batch_size == 64
        chosen = following.plan


def test_retries_then_checkpoint_activations_then_shard_more_then_change_the_gpu() -> None:
    requested = job(engine="deepspeed", method="lora", seq_len=512)
    made = planned(requested)
    assert (made.layout.sharding, made.layout.activation_checkpointing) == ("zero1", False)
    kinds = []
    for following in chain(requested, made):
        now, then = following.plan, made
        if now.request.gpu_type != then.request.gpu_type:
            kinds.append("gpu")
        elif now.layout.sharding != then.layout.sharding:
            kinds.append("sharding")
        elif now.layout.activation_checkpointing != then.layout.activation_checkpointing:
            kinds.append("checkpointing")
        else:
            kinds.append("micro batch")
        made = now
    order = ["micro batch", "checkpointing", "sharding", "gpu"]
    assert list(dict.fromkeys(kinds)) == order
    assert kinds == sorted(kinds, key=order.index)


def test_user_settings_are_kept() -> None:
    requested = job(micro_batch_size=2, activation_checkpointing=False)
    chosen = planned(requested, gpus=8)
    for following in chain(requested, chosen):
        assert following.plan.layout.micro_batch_size == 2
        assert not following.plan.layout.activation_checkpointing


def test_every_change_is_noted_with_the_attempt_that_failed() -> None:
    requested = job()
    chosen = planned(requested)
    following = after_out_of_memory(chosen, requested, attempt=1)
    notes = {note.name: note for note in following.plan.overrides}
    assert notes["micro_batch_size"].planned == str(chosen.layout.micro_batch_size)
    assert {note.given_by for note in notes.values()} == {"out of memory in attempt 1"}
    assert Plan.from_json(following.plan.to_json()) == following.plan


def test_the_next_gpu_has_the_next_larger_memory_and_enough_gpus_per_machine() -> None:
    requested = job(micro_batch_size=1, activation_checkpointing=True)
    chosen = planned(requested, gpu="a100-80gb")
    following = after_out_of_memory(chosen, requested, attempt=0)
    assert following.needs_other_machine
    assert following.plan.request.gpu_type != chosen.request.gpu_type
    larger = {
        hardware.gpu(machine.gpu).vram_bytes
        for machine in hardware.instances()
        if machine.cloud in ("aws", "gcp", "azure")
        and machine.gpu_count >= 8
        and hardware.gpu(machine.gpu).vendor == "nvidia"
        and hardware.gpu(machine.gpu).vram_bytes > hardware.gpu("a100-80gb").vram_bytes
    }
    assert hardware.gpu(following.plan.request.gpu_type or "").vram_bytes == min(larger)
    assert after_out_of_memory(chosen, requested, attempt=0, other_machines=False) is None


def test_a_local_machine_has_no_other_gpu_to_switch_to() -> None:
    requested = job(micro_batch_size=1, activation_checkpointing=True, method="lora")
    here = Machine(
        gpus=(("NVIDIA H100 80GB HBM3", 80 * GIB),),
        cpu_cores=16,
        ram_bytes=128 * GIB,
        disk_free_bytes=900 * GIB,
    )
    chosen = plan(requested, Target(kind="local", machine=here))
    assert after_out_of_memory(chosen, requested, attempt=0) is None
