"""Vocabulary of published tables: engines, methods, targets, kinds of memory, 8-bit products, optimizers."""

from pathlib import Path

import pytest

from benchmarks.published import vocabulary
from benchmarks.published.vocabulary import UnsupportedRow
from estimator.models import PROJECTIONS
from estimator.vocabulary import Engine
from tests.benchmarks.published.measured_tables import read


@pytest.mark.parametrize(
    ("framework", "engine"),
    [
        ("torchtune@52d1b838", "torchtune"),
        ("torchtitan/SimpleFSDP(aot_eager)", "torchtitan"),
        ("litgpt", "litgpt"),
        ("ms-swift", "transformers"),
        ("HF Trainer FSDP1", "transformers"),
        ("HF TRL+PEFT+DeepSpeed", "deepspeed"),
        ("megatron-core/bridge", "megatron"),
        ("composer/llm-foundry FSDP1", "composer"),
        ("FSDP1 (fms-fsdp)", "composer"),
    ],
)
def test_a_framework_is_recognized_by_a_word_of_its_name(framework: str, engine: str) -> None:
    assert vocabulary.engine_of(framework) == engine


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("full (pure bf16)", ("full", "sft", False, False)),
        ("lora+emb", ("lora", "sft", False, True)),
        ("QLoRA", ("lora", "sft", True, False)),
        ("lora-dora", ("dora", "sft", False, False)),
        ("lora-dpo", ("lora", "dpo", False, False)),
        ("adapter", ("adapter-v1", "sft", False, False)),
        ("adapter_v2", ("adapter-v2", "sft", False, False)),
    ],
)
def test_methods_are_recognized_in_every_spelling(method: str, expected: tuple[object, ...]) -> None:
    assert vocabulary.method_of(method) == expected


@pytest.mark.parametrize(
    "method",
    [
        *("ia3", "vera", "oft", "adalora", "ln_tuning", "osf", "lora-fa"),
        *("galore", "full+galore", "longlora", "qlora weights only", "lora (after model init only)"),
    ],
)
def test_an_unknown_method_is_skipped_by_name(method: str) -> None:
    with pytest.raises(UnsupportedRow, match="not supported"):
        vocabulary.method_of(method)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("q,v", {"q_proj", "v_proj"}),
        ("q,k,v(yaml)", {"q_proj", "k_proj", "v_proj"}),
        ("all-linear", set(PROJECTIONS)),
        ("all+output", {*PROJECTIONS, "lm_head"}),
        ("query,key,value,projection,mlp,head", {*PROJECTIONS, "lm_head"}),
        ("c_attn,c_proj,w1,w2", set(PROJECTIONS)),
        ("linear_qkv,linear_proj,linear_fc1,linear_fc2", set(PROJECTIONS)),
        ("", set()),
    ],
)
def test_lora_targets_are_recognized_in_every_spelling(text: str, expected: set[str]) -> None:
    assert set(vocabulary.targets_of(text)) == expected


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("reserved max (incl. eval generation bs4)", "reserved"),
        ("peak active", "active"),
        ("max_memory_allocated", "allocated"),
        ("nvidia-smi/screenshot", "process"),
        ("needed", "needed"),
    ],
)
def test_the_kind_of_memory_is_recognized_in_every_wording(text: str, kind: str) -> None:
    assert vocabulary.kind_of(text) == kind


@pytest.mark.parametrize("text", ["peak", "unknown(profiled)", "estimated total", "model weights"])
def test_memory_of_an_unknown_kind_is_skipped_with_the_reason(tmp_path: Path, text: str) -> None:
    row = read(tmp_path, mem_kind=text)
    assert row.memory_skip
    assert row.throughput_skip is None


@pytest.mark.parametrize(
    ("compute", "framework", "kind"),
    [
        ("bf16", "torchtitan", "none"),
        ("bf16+fp8(rowwise)", "torchtitan", "rowwise"),
        ("float8", "torchtitan", "tensorwise"),
        ("FP8", "megatron-core/bridge", "te"),
        ("amp_fp8", "composer/llm-foundry", "te"),
        ("MXFP8", "megatron-core/bridge", "mxfp8"),
    ],
)
def test_the_kind_of_8_bit_product_is_read(compute: str, framework: str, kind: str) -> None:
    assert vocabulary.fp8_of(compute, vocabulary.engine_of(framework)) == kind


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("bnb.nf4", "nf4"),
        ("nf4-dq(bnb, bf16 storage)", "nf4-double"),
        ("bnb int8", "int8"),
        ("gptq-int4", "nf4-double"),
        ("awq", "nf4-double"),
        ("", "nf4"),
    ],
)
def test_the_storage_of_a_qlora_base_is_read(text: str, kind: str) -> None:
    assert vocabulary.quantization_of(text, quantized=True) == kind


@pytest.mark.parametrize("text", ["aqlm", "2bit", "nvfp4"])
def test_an_unknown_storage_format_is_skipped(text: str) -> None:
    with pytest.raises(UnsupportedRow, match="not supported"):
        vocabulary.quantization_of(text, quantized=True)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("decoupled_adamw", "adamw"),
        ("Adam (distributed opt)", "adamw"),
        ("AdamW8bit(bnb)", "adamw8bit"),
        ("PagedAdamW(bnb)", "paged-adamw"),
        ("paged_adamw_32bit", "paged-adamw"),
        ("AdamW4bit(torchao)", "adamw4bit"),
        ("Muon+AdamW", "muon"),
    ],
)
def test_optimizers_are_recognized_in_every_spelling(text: str, kind: str) -> None:
    assert vocabulary.optimizer_of(text) == kind


def test_a_recomputed_output_head_is_a_separate_loss_kind() -> None:
    assert vocabulary.loss_of("CE recomputed in chunks", "deepspeed", 2048) == ("recomputed", 8)


@pytest.mark.parametrize(
    ("framework", "notes", "engine", "version"),
    [
        ("Transformers 4 Trainer", "foak = unsloth Triton CE, RMSNorm, RoPE", "transformers", "unsloth"),
        ("HF Trainer+PEFT<0.8", "", "transformers", "peft-0.7"),
        ("FSDP1 raw loop", "", "transformers", "loop"),
        ("megatron-core/bridge", "pretrain; one CUDA graph; HybridEP", "megatron", "full-graph"),
        ("megatron-core/bridge", "CUDA graphs of attention and router", "megatron", "attention-graph"),
        ("megatron-core/bridge", "CUDA graphs of the router; DeepEP", "megatron", ""),
    ],
)
def test_the_version_of_the_code_is_read(framework: str, notes: str, engine: Engine, version: str) -> None:
    assert vocabulary.version_of(framework, "", notes, engine) == version


@pytest.mark.parametrize(
    ("notes", "engine", "by_expert"),
    [
        ("throughput only; HybridEP", "megatron", False),
        ("DeepEP; Interleaved1F1B", "torchtitan", False),
        ("standard all-to-all", "torchtitan", True),
        ("throughput only", "megatron", None),
        ("DeepEP", "deepspeed", None),
    ],
)
def test_the_dispatch_of_tokens_is_read(notes: str, engine: Engine, by_expert: bool | None) -> None:
    assert vocabulary.dispatches_by_expert(notes, engine) is by_expert
