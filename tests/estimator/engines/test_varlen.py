"""Models with and without variable-length attention, and what plans and estimates make of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from estimator import memory, models
from estimator.engines import support, varlen
from estimator.engines.setups import setup_of, variable_length
from estimator.job import Job
from estimator.models.architectures import FAMILIES, family_of
from estimator.plan import Layout
from estimator.setup import Setup
from estimator.throughput.flops import work

GPT_OSS = Setup(
    model=models.find("gpt-oss-20b"), engine="fsdp2", precision="bf16-mixed", seq_len=4096, method="lora"
)


def reason(name: str) -> str | None:
    return varlen.unsupported(models.find(name), "sft", "lora", "bf16-mixed")


@pytest.mark.parametrize(
    "name",
    [
        "gpt-oss-20b",
        "gemma-4-e4b",
        "glm-4.5-air",
        "glm-4.7-flash",
        "ministral-3-8b",
        "smollm3-3b",
        "deepseek-v3",
        "exaone-4-1.2b",
        "minimax-m2",
    ],
)
def test_models_of_tested_families_have_no_mask(name: str) -> None:
    assert reason(name) is None


def test_every_other_family_of_the_table_has_its_own_reason() -> None:
    others = {
        family
        for family, traits in FAMILIES.items()
        if traits.causal and not traits.code_elsewhere and family not in varlen.FAMILIES
    }
    specific = {family: varlen.REASONS.get(family) or family_of(family).packing_leak for family in others}
    assert all(specific.values()), specific
    assert not varlen.REASONS.keys() & set(varlen.FAMILIES)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gemma-2-9b", "caps the scores"),
        ("qwen3-next-80b-a3b", "linear attention carries its state across documents"),
        ("lfm2-350m", "convolutions mix"),
        ("deepseek-v3.2", "indexer"),
        ("seed-oss-36b", "attention_dropout 0.1"),
    ],
)
def test_the_reason_names_what_keeps_the_mask(name: str, words: str) -> None:
    assert words in (reason(name) or "")


@pytest.mark.parametrize(
    ("engine", "device", "precision", "expected"),
    [
        ("fsdp2", "cuda", "bf16-mixed", True),
        ("deepspeed", "cuda", "bf16", True),
        ("fsdp2", "cuda", "fp32", False),
        ("fsdp2", "cpu", "bf16-mixed", False),
        ("transformers", "cuda", "bf16", False),
    ],
)
def test_only_the_loop_engines_on_gpus_with_bf16_have_it(
    engine: str, device: str, precision: str, *, expected: bool
) -> None:
    assert variable_length(engine, device, GPT_OSS.model, "sft", "lora", precision) == expected


def test_memory_and_work_of_attention_with_sinks_grow_with_the_tokens_only() -> None:
    kernel, own_code = replace(GPT_OSS, variable_length=True), GPT_OSS
    for setup, quadratic in ((kernel, False), (own_code, True)):
        longer = replace(setup, seq_len=2 * setup.seq_len)
        per_token = [memory.saved_bytes(each) / each.tokens for each in (setup, longer)]
        moved = [work(each).moved / each.tokens for each in (setup, longer)]
        assert (per_token[1] > 1.5 * per_token[0]) == quadratic
        assert (per_token[1] == pytest.approx(per_token[0])) != quadratic
        assert (moved[1] == pytest.approx(moved[0])) != quadratic
    assert memory.saved_bytes(kernel) < memory.saved_bytes(own_code) / 3


def test_padded_values_of_latent_attention_are_counted() -> None:
    model = models.find("deepseek-v3")
    mask = Setup(model=model, engine="fsdp2", precision="bf16-mixed")
    kernel = replace(mask, variable_length=True)
    assert memory.saved_bytes(kernel) > memory.saved_bytes(mask)
    assert work(kernel).attention == pytest.approx(work(mask).attention * 2 * 192 / (192 + 128))


def test_batches_without_padding_repeat_no_keys() -> None:
    padded = Setup(model=models.find("llama-8b"), engine="fsdp2", precision="bf16-mixed", fixed_length=False)
    assert memory.saved_bytes(replace(padded, variable_length=True)) < memory.saved_bytes(padded)


def test_a_job_without_it_has_a_mask_and_packs_only_on_request() -> None:
    job = Job(model=models.find("llama-8b"), engine="fsdp2", packing=None, liger=None, compile=None)
    layout = Layout(
        device="cuda",
        nodes=1,
        processes_per_node=1,
        sharding="none",
        micro_batch_size=1,
        accumulation=8,
        seq_len=8192,
        activation_checkpointing=False,
        precision="bf16-mixed",
        optimizer="adamw",
        offload="none",
    )
    kernel = setup_of(job, layout)
    masked = setup_of(replace(job, variable_length=False), layout)
    packed = setup_of(replace(job, variable_length=False, packing=True), layout)
    assert (kernel.variable_length, kernel.fixed_length, kernel.document_mask) == (True, True, False)
    assert (masked.variable_length, masked.fixed_length, masked.document_mask) == (False, False, False)
    assert (packed.variable_length, packed.fixed_length, packed.document_mask) == (False, True, True)


@pytest.mark.parametrize(
    ("name", "engine", "words"),
    [
        ("llama-8b", "fsdp2", None),
        ("gemma2-9b", "fsdp2", "variable_length: gemma2"),
        ("llama-8b", "torchtune", "variable_length: engine torchtune"),
    ],
)
def test_a_required_kernel_that_does_not_apply_is_refused(name: str, engine: str, words: str | None) -> None:
    job = Job(model=models.find(name), variable_length=True)
    reason = support.unsupported(engine, job)
    assert reason is None if words is None else str(reason).startswith(words)
