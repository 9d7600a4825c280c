"""Selection and order of the measured runs, and the settings of each."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.on_gpu import cases
from benchmarks.on_gpu.cases import ON_CPU, ON_GPUS
from estimator.errors import UserError
from estimator.job import Machine
from tests.benchmarks.on_gpu.machines import H100S, H200, L4, plan_of

ALONE = Machine(cpu_cores=2, ram_bytes=2**34, disk_free_bytes=2**40)


def models_of(machine: Machine, **traits: object) -> dict[str, str]:
    """Return the model by method and engine of the cases with these traits."""
    return {
        f"{case.method} {case.engine}": case.model
        for case in cases.in_order(ON_GPUS, machine)
        if all(getattr(case, name) == value for name, value in traits.items())
    }


def test_each_combination_of_method_engine_length_and_switch_is_one_case() -> None:
    every = cases.in_order(ON_GPUS, H200)
    assert len(every) == len({case.name for case in every}) == 3 * 3 * (4 + 2)
    switches = {(case.longest_first, case.expandable_segments) for case in every if case.lengths == "varying"}
    assert len(switches) == 4


def test_each_case_uses_the_largest_model_predicted_to_fit() -> None:
    on_24_gib = models_of(L4)
    assert (on_24_gib["qlora torchtune"], on_24_gib["full torchtune"]) == ("llama-3.1-8b", "llama-3.2-1b")
    assert set(models_of(H200).values()) == {"llama-3.1-8b", "llama-3.2-3b"}


def test_a_machine_of_several_gpus_is_measured_on_one_and_on_all() -> None:
    assert {case.processes for case in cases.in_order(ON_GPUS, H100S)} == {1, 8}
    assert models_of(H100S, processes=8)["full deepspeed"] == "llama-3.1-8b"
    assert models_of(H100S, processes=1)["full deepspeed"] == "llama-3.2-3b"


def test_the_smallest_model_is_tried_even_if_nothing_fits() -> None:
    tiny = replace(H200, gpus=(("NVIDIA T400", 2 * 2**30),))
    case = cases.in_order(ON_GPUS, tiny)[1]
    assert (case.method, case.model) == ("full", "llama-3.2-1b")
    plan = plan_of(case, ON_GPUS, tiny)
    assert plan.prediction.memory.needs_bytes > 2 * 2**30
    assert plan.layout.micro_batch_size == ON_GPUS.micro_batch_size


def test_an_unsupported_case_has_the_reason_of_the_engine() -> None:
    every = cases.in_order(ON_CPU, ALONE, "smollm2-135m")
    refused = [case for case in every if cases.unsupported_case(case, ON_CPU)]
    assert {(case.method, case.engine) for case in refused} == {("qlora", "torchtune")}
    assert "NF4 needs matrices" in str(cases.unsupported_case(refused[0], ON_CPU))


def test_the_settings_of_a_case_have_its_switches_and_no_evaluation() -> None:
    for case in cases.in_order(ON_GPUS, H100S):
        settings = cases.settings_of(case, ON_GPUS, Path("/models/m"), Path("rows.jsonl"))
        assert settings.longest_first == case.longest_first
        assert settings.expandable_segments == case.expandable_segments
        assert (settings.packing, settings.global_batch_size) == (case.lengths == "fixed", 4 * case.processes)
        assert settings.checkpoint_every > ON_GPUS.steps
        assert settings.evaluation.fraction == settings.evaluation.generations == 0


def test_the_only_option_matches_words_of_a_name_in_any_order() -> None:
    every = cases.in_order(ON_CPU, ALONE)
    chosen = cases.chosen(every, "packed lora off")
    assert {case.name for case in chosen} == {
        f"tiny-llama lora {engine}, packed, expandable segments off" for engine in cases.ENGINES
    }
    with pytest.raises(UserError, match="--only lora megatron: no case has all these words"):
        cases.chosen(every, "lora megatron")
