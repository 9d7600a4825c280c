"""Engine ``auto``: which engine is taken, and what is said of the runner-up."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from estimator import Job, Target, hardware, plan
from estimator.engines.support import jobs_by_engine
from estimator.job import Machine
from estimator.models import find
from estimator.plan import GIB, Plan
from estimator.planning.candidates import TIE_MARGIN
from estimator.planning.engine_choice import by_preference, faster_than, reason

ANY = Target(kind="catalogue")


def made_for(model: str = "llama-8b", target: Target = ANY, **fields: Any) -> Plan:
    return plan(Job(model=find(model), engine="auto", global_batch_size=16, **fields), target)


def line_of(made: Plan) -> str:
    [line] = [line for line in made.why if line.startswith(f"engine {made.engine}: ")]
    return line


@given(speeds=st.dictionaries(st.sampled_from("abc"), st.none() | st.floats(1, 1e6), min_size=1))
def test_the_engine_changes_only_to_the_fastest_one_that_is_clearly_faster(
    speeds: dict[str, float | None],
) -> None:
    first = next(iter(speeds))
    other, own = faster_than(first, speeds), speeds[first] or 0.0
    fastest = max(speed or 0.0 for speed in speeds.values())
    assert (other is not None) == (fastest > own * (1 + TIE_MARGIN))
    assert other is None or speeds[other] == fastest


def test_the_reason_names_the_runner_up_and_the_difference() -> None:
    assert "the runner-up, fsdp2, is 5.0 % slower" in reason("deepspeed", {"deepspeed": 100.0, "fsdp2": 95.0})
    tie = reason("deepspeed", {"deepspeed": 100.0, "fsdp2": 110.0, "torchtune": 50.0})
    assert "fsdp2, is 10 % faster on these GPUs, a tie, and deepspeed is simpler" in tie
    assert "fsdp2 would not fit" in reason("torchtune", {"torchtune": 1.0, "fsdp2": None})


@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
def test_no_supported_engine_is_clearly_faster_than_the_chosen_one(method: Any) -> None:
    chosen = made_for(method=method)
    request = chosen.request
    place = Target(
        kind="catalogue", instance_type=request.instance_type, nodes=request.nodes, gpus=request.gpus_per_node
    )
    jobs = jobs_by_engine(Job(model=find("llama-8b"), engine="auto", method=method, global_batch_size=16))
    group = next(group for group in by_preference(jobs) if chosen.engine in {job.engine for job in group})
    assert len(group) > 1
    rates = [plan(job, place).prediction.tokens_per_second or 0.0 for job in group]
    assert max(rates) <= (chosen.prediction.tokens_per_second or 0.0) * (1 + TIE_MARGIN)
    assert "runner-up" in line_of(chosen)


def test_full_training_keeps_fp32_master_weights_if_they_fit_else_explains_why_not() -> None:
    roomy = made_for(target=Target(kind="catalogue", gpu="H100 SXM", nodes=1, gpus=8))
    assert roomy.layout.precision == "bf16-mixed"
    small = made_for(target=Target(kind="catalogue", gpu="A100 SXM 80GB", nodes=1, gpus=1))
    assert (small.engine, small.layout.precision) == ("torchtune", "bf16")
    assert "with fp32 master weights, fsdp2 and deepspeed would not fit" in line_of(small)


def test_a_sole_engine_drops_master_weights_only_if_they_fit_nowhere() -> None:
    for name, gpu, precision in (
        ("llama-8b", "H200 SXM", "bf16"),
        ("llama-3.2-1b", "H200 SXM", "bf16-mixed"),
    ):
        place = Target(kind="catalogue", gpu=gpu, nodes=1, gpus=8)
        chosen = made_for(name, place, task="grpo", method="full")
        assert (chosen.engine, chosen.layout.precision) == ("trl", precision)
        lean = "with fp32 master weights, trl would not fit; weights and optimizer states are in bf16"
        assert any(lean in line for line in chosen.why[:3]) == (precision == "bf16")
    rare = made_for("qwen3-8b", Target(kind="catalogue", gpu="B200"), method="full")
    assert rare.layout.precision == "bf16-mixed", "low availability is no reason to give them up"


def test_master_weights_are_dropped_before_a_tight_plan_is_accepted() -> None:
    name = hardware.gpu("A100 SXM 40GB").name
    accepted = set()
    for size in (22, 23, 24):
        cards = ((name, size * GIB),) * 8
        machine = Machine(gpus=cards, cpu_cores=64, ram_bytes=512 * GIB, disk_free_bytes=2048 * GIB)
        assert made_for(target=Target(machine=machine)).prediction.memory.verdict == "fits"
        tight = made_for(target=Target(machine=machine, tight=True))
        accepted.add((tight.layout.precision, tight.prediction.memory.verdict))
    assert ("bf16-mixed", "tight") in accepted


def test_master_weights_are_dropped_before_unmeasured_gpus_are_used() -> None:
    chosen = made_for("llama-70b", method="full")
    assert chosen.request.gpu_type == "A100 SXM 80GB"
    assert "would use GPUs without measurements or with low availability" in line_of(chosen)
    rare = made_for(target=Target(kind="catalogue", gpu="B200"), method="full")
    assert rare.layout.precision == "bf16-mixed", "where nothing else is available"


def test_a_requested_engine_is_not_compared_and_an_uninstalled_one_not_chosen() -> None:
    asked = plan(Job(model=find("llama-8b"), engine="torchtune", global_batch_size=16), ANY)
    assert asked.engine == "torchtune"
    assert not any(line.startswith("engine ") for line in asked.why)
    assert made_for(engines=("torchtune",)).engine == "torchtune"


def test_engines_are_compared_on_local_gpus_but_not_on_cpus() -> None:
    card = (hardware.gpu("H100 SXM").name, 80 * GIB)
    machine = Machine(gpus=(card,) * 8, cpu_cores=64, ram_bytes=512 * GIB, disk_free_bytes=2048 * GIB)
    here = made_for(method="lora", target=Target(machine=machine))
    assert "runner-up" in line_of(here)
    laptop = Machine(cpu_cores=4, ram_bytes=16 * GIB, disk_free_bytes=100 * GIB)
    assert made_for("tiny-llama", Target(machine=laptop), seq_len=256).engine == "torchtune"
