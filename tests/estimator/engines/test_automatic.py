"""Packing, Liger and torch.compile where a job leaves them open."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import tests
from estimator import Job, Target, plan
from estimator.engines.automatic import CHOICES, FLOAT8, FLOAT8_FROZEN, PROVEN, with_choices
from estimator.errors import UserError
from estimator.models import find
from estimator.planning.run_command import run_command

OPEN: dict[str, Any] = dict.fromkeys(CHOICES)
JOB = Job(model=find("llama-8b"), method="lora", engine="fsdp2", global_batch_size=16, **OPEN)
ONE = Target(kind="catalogue", nodes=1, gpus=1, gpu="H100 SXM")


def on(job: Job, device: Any = "cuda", precision: Any = "bf16", sharding: Any = "zero3") -> set[str]:
    chosen = with_choices(job, device, precision, sharding)
    assert all(isinstance(getattr(chosen, choice), bool) for choice in CHOICES)
    return {choice for choice in CHOICES if getattr(chosen, choice)}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {"packing", "liger", "compile"}),
        ({"engine": "deepspeed"}, {"packing", "liger"}),
        ({"engine": "deepspeed", "zero_stage": 2}, {"packing", "liger", "compile"}),
        ({"engine": "torchtune"}, {"packing", "compile"}),
        ({"method": "qlora"}, {"packing", "liger", "compile"}),
        ({"model": find("gemma-2-9b")}, {"liger"}),
        ({"model": find("gemma-3-12b")}, {"packing", "liger", "compile"}),
        ({"model": find("qwen3-30b-a3b")}, {"packing", "liger"}),
        (
            {"model": find("olmo-3-7b"), "engine": "deepspeed", "zero_stage": 2},
            {"packing", "liger", "compile"},
        ),
        ({"model": find("qwen-7b")}, set()),
        ({"task": "dpo"}, {"liger"}),
        ({"task": "reward"}, set()),
        ({"method": "adapter-v1"}, set()),
        ({"trained_modules": ("lm_head",)}, {"packing", "compile"}),
    ],
)
def test_accelerations_are_on_for_tested_engines_and_families_and_off_on_cpus(
    fields: dict[str, Any], expected: set[str]
) -> None:
    assert on(replace(JOB, **fields)) == expected
    assert on(replace(JOB, **fields), "cpu") == set()


def test_deepspeed_compiles_where_the_plan_chooses_a_stage_that_leaves_weights_whole() -> None:
    job = replace(JOB, engine="deepspeed")
    assert with_choices(job, "cuda", "bf16-mixed").compile is None, "the stage is not chosen yet"
    for sharding, compiled in (("zero0", True), ("zero1", True), ("zero2", True), ("zero3", False)):
        assert ("compile" in on(job, sharding=sharding)) == compiled
    alone = plan(job, ONE)
    assert (alone.layout.sharding, alone.compile) == ("zero0", True)
    assert any(line.startswith("automatic: packing, liger, compile on") for line in alone.why)
    large = plan(replace(job, model=find("llama-70b"), method="full"), replace(ONE, nodes=2, gpus=8))
    assert (large.layout.sharding, large.compile) == ("zero3", False)
    assert any("compile off (it needs zero.stage 0, 1, 2 or auto" in line for line in large.why)


def test_compilation_set_by_the_user_excludes_zero3() -> None:
    job = replace(JOB, engine="deepspeed", compile=True, model=find("llama-70b"), method="full")
    sixteen = replace(ONE, nodes=2, gpus=8)
    assert plan(replace(job, compile=False), sixteen).layout.sharding == "zero3"
    with pytest.raises(UserError, match="does not fit"):
        plan(job, sixteen)


@pytest.mark.parametrize("choice", CHOICES)
def test_a_value_set_by_the_user_overrides_the_automatic_choice(choice: str) -> None:
    assert choice not in on(replace(JOB, **{choice: False}))
    small = replace(JOB, model=find("tiny-llama"), seq_len=128)
    assert choice in on(replace(small, **{choice: True}), "cpu")


def test_the_plan_records_and_explains_automatic_choices() -> None:
    chosen = plan(JOB, ONE)
    assert (chosen.packing, chosen.liger, chosen.compile) == (True, True, True)
    assert [line for line in chosen.why if line.startswith("automatic: ")] == [
        "automatic: packing, liger, compile on (tested with fsdp2 and llama models)"
    ]
    partly = plan(replace(JOB, compile=False, engine="deepspeed", task="dpo"), ONE)
    [line] = [line for line in partly.why if line.startswith("automatic: ")]
    assert "packing off (a row of dpo is a pair of answers" in line
    assert "compile" not in line, "it was given"
    fixed = plan(replace(JOB, **dict.fromkeys(CHOICES, False)), ONE)
    assert not any(line.startswith("automatic: ") for line in fixed.why)


@pytest.mark.parametrize("engine", ["fsdp2", "deepspeed", "torchtune"])
def test_gpus_older_than_ampere_do_not_pack_by_default_and_the_plan_explains_why(engine: Any) -> None:
    job = replace(JOB, model=find("llama-3.2-1b"), engine=engine)
    assert "packing" not in on(job, precision="fp32")
    for gpu in ("V100 SXM2 16GB", "T4"):
        chosen = plan(job, replace(ONE, gpu=gpu))
        assert (chosen.packing, chosen.compile) == (False, False)
        [line] = [line for line in chosen.why if line.startswith("automatic: ")]
        assert "packing off (documents would be separated by a dense mask" in line
        packed = plan(replace(job, packing=True), replace(ONE, gpu=gpu))
        assert packed.packing
        if engine != "torchtune":
            assert any("dense mask, which is slower: FlashAttention" in line for line in packed.why)


@pytest.mark.parametrize(
    ("fields", "gpu", "offered"),
    [
        ({}, "H100 SXM", True),
        ({"method": "full", "precision": "bf16", "model": find("llama-3.2-1b")}, "H100 SXM", True),
        ({}, "A100 SXM 80GB", False),
        ({"method": "qlora"}, "H100 SXM", False),
        ({"engine": "torchtune"}, "H100 SXM", False),
        ({"fp8": "rowwise"}, "H100 SXM", False),
        ({"compile": False}, "H100 SXM", False),
    ],
)
def test_a_plan_mentions_supported_float8_but_never_enables_it(
    fields: dict[str, Any], gpu: str, offered: bool
) -> None:
    job = replace(JOB, **fields)
    chosen = plan(job, replace(ONE, gpu=gpu))
    assert (FLOAT8 in chosen.why) == offered


@pytest.mark.parametrize(
    ("fields", "named"),
    [({"compile": False}, True), ({"compile": False, "method": "full"}, False), ({"compile": True}, False)],
)
def test_a_plan_names_the_useless_work_of_float8_adapters_that_are_not_compiled(
    fields: dict[str, Any], named: bool
) -> None:
    job = replace(JOB, fp8="rowwise", **({"model": find("llama-3.2-1b")} | fields))
    assert (FLOAT8_FROZEN in plan(job, ONE).why) == named


def test_the_command_sets_only_choices_that_the_run_would_decide_differently() -> None:
    assert not any(f"--{choice}" in command_of(JOB) for choice in CHOICES)
    assert command_of(replace(JOB, compile=False, liger=False)).endswith("--no-liger --no-compile")
    assert "--packing" in command_of(replace(JOB, global_batch_size=32)), "its batch would count rows"


def command_of(job: Job) -> str:
    return run_command(plan(job, ONE), job, "llama-8b", None)


def test_every_row_names_a_test_that_exists() -> None:
    for row in PROVEN:
        assert (Path(tests.__file__).parent / row.test).is_file(), row
