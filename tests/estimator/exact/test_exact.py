"""The formulas of ``estimator.memory`` against traces of the real code, on a grid of small shapes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from estimator import memory
from estimator.exact import ExactEstimate, estimate_many
from estimator.setup import Setup
from tests.estimator.exact.shapes import (
    DEEPSEEK_V4,
    DEEPSPEED,
    GEMMA4,
    GEMMA4_MOE,
    GLM4,
    GLM_5,
    LFM2,
    LFM3,
    MISTRAL4,
    MIXTRAL,
    NARROW,
    NEMOTRON_H,
    QWEN2,
    QWEN3,
    QWEN3_5,
    QWEN3_MOE,
    TORCHTITAN,
    TORCHTUNE,
    TRANSFORMERS,
    WIDE,
    fsdp,
    zero,
)

LORA = {"method": "lora"}
QLORA = {"method": "lora", "quantization": "nf4-double"}
AC = {"checkpointing": "full"}
ATTENTION_ONLY = {"lora_targets": ("q_proj", "v_proj"), "lora_rank": 16}

GRID: dict[str, Setup] = {
    "torchtune": TORCHTUNE,
    "torchtune, plain loss": replace(TORCHTUNE, loss="plain"),
    "torchtune, checkpointing": replace(TORCHTUNE, **AC),
    "torchtune, accumulation": replace(TORCHTUNE, accumulation=4),
    "torchtune, wide, tied": replace(TORCHTUNE, model=WIDE),
    "torchtune, wide, tied, plain loss, checkpointing": replace(TORCHTUNE, model=WIDE, loss="plain", **AC),
    "torchtune, narrow, short": replace(TORCHTUNE, model=NARROW, seq_len=128, micro_batch_size=4),
    "torchtune, qwen2": replace(TORCHTUNE, model=QWEN2),
    "torchtune, fp32": replace(TORCHTUNE, precision="fp32"),
    "torchtune, sgd": replace(TORCHTUNE, optimizer="sgd", **AC),
    "torchtune, compiled": replace(TORCHTUNE, compile=True),
    "torchtune, compiled, lora, checkpointing": replace(TORCHTUNE, compile=True, **LORA, **AC),
    "torchtune, lora": replace(TORCHTUNE, **LORA),
    "torchtune, lora, checkpointing": replace(TORCHTUNE, **LORA, **AC),
    "torchtune, lora of attention": replace(TORCHTUNE, **LORA, **ATTENTION_ONLY),
    "torchtune, qlora, checkpointing": replace(TORCHTUNE, **QLORA, **AC),
    "torchtune, fsdp 2": replace(TORCHTUNE, **fsdp(2)),
    "torchtune, fsdp 8": replace(TORCHTUNE, **fsdp(8)),
    "torchtune, fsdp 8, checkpointing": replace(TORCHTUNE, **fsdp(8), **AC),
    "torchtune, fsdp 8, lora": replace(TORCHTUNE, **fsdp(8), **LORA),
    "torchtune, fsdp 8, lora, checkpointing, few tokens": replace(
        TORCHTUNE, micro_batch_size=1, seq_len=64, **fsdp(8), **LORA, **AC
    ),
    "torchtune, tensor 2": replace(TORCHTUNE, tensor=2, sequence_parallel=False),
    "torchtitan, fsdp 8": replace(TORCHTITAN, **fsdp(8)),
    "torchtitan, fsdp 8, checkpointing": replace(TORCHTITAN, **fsdp(8), **AC),
    "torchtitan, fsdp 8, selective": replace(TORCHTITAN, **fsdp(8), checkpointing="selective"),
    "torchtitan, fsdp 2, tensor 2": replace(TORCHTITAN, tensor=2, **fsdp(2)),
    "transformers": TRANSFORMERS,
    "transformers, checkpointing": replace(TRANSFORMERS, **AC),
    "transformers, a loop that holds the logits": replace(TRANSFORMERS, engine_version="loop"),
    "transformers, a loop that holds the logits, lora": replace(TRANSFORMERS, engine_version="loop", **LORA),
    "transformers, wide, tied": replace(TRANSFORMERS, model=WIDE),
    "transformers, qwen2": replace(TRANSFORMERS, model=QWEN2),
    "transformers, qwen3": replace(TRANSFORMERS, model=QWEN3),
    "transformers, mixtral": replace(TRANSFORMERS, model=MIXTRAL),
    "transformers, mixtral, checkpointing": replace(TRANSFORMERS, model=MIXTRAL, **AC),
    "transformers, qwen3 moe": replace(TRANSFORMERS, model=QWEN3_MOE),
    "transformers, mixtral, lora": replace(TRANSFORMERS, model=MIXTRAL, **LORA, **ATTENTION_ONLY),
    "transformers, qwen3.5": replace(TRANSFORMERS, model=QWEN3_5),
    "transformers, qwen3.5, checkpointing": replace(TRANSFORMERS, model=QWEN3_5, **AC),
    "transformers, nemotron-h": replace(TRANSFORMERS, model=NEMOTRON_H),
    "transformers, lfm2": replace(TRANSFORMERS, model=LFM2),
    "transformers, lfm3": replace(TRANSFORMERS, model=LFM3),
    "transformers, gemma4": replace(TRANSFORMERS, model=GEMMA4),
    "transformers, gemma4, lora": replace(TRANSFORMERS, model=GEMMA4, **LORA),
    "transformers, gemma4 moe": replace(TRANSFORMERS, model=GEMMA4_MOE),
    "transformers, mistral4": replace(TRANSFORMERS, model=MISTRAL4),
    "transformers, glm4": replace(TRANSFORMERS, model=GLM4),
    "transformers, glm 5": replace(TRANSFORMERS, model=GLM_5),
    "transformers, deepseek v4": replace(TRANSFORMERS, model=DEEPSEEK_V4),
    "transformers, deepseek v4, checkpointing": replace(TRANSFORMERS, model=DEEPSEEK_V4, **AC),
    "deepspeed, zero 2, deepseek v4, lora": replace(
        DEEPSPEED, model=DEEPSEEK_V4, **zero(2, 8), **LORA, lora_targets=DEEPSEEK_V4.all_linear
    ),
    "deepspeed, zero 2, qwen3.5": replace(DEEPSPEED, model=QWEN3_5, **zero(2, 8)),
    "deepspeed, zero 2, lora, lfm2": replace(
        DEEPSPEED, model=LFM2, **zero(2, 8), **LORA | {"lora_targets": LFM2.all_linear}
    ),
    "transformers, lora": replace(TRANSFORMERS, **LORA),
    "transformers, lora, checkpointing": replace(TRANSFORMERS, **LORA, **AC),
    "deepspeed, zero 1": replace(DEEPSPEED, **zero(1, 8)),
    "deepspeed, zero 2": replace(DEEPSPEED, **zero(2, 2)),
    "deepspeed, zero 3": replace(DEEPSPEED, **zero(3, 8)),
    "deepspeed, zero 3, checkpointing": replace(DEEPSPEED, **zero(3, 8), **AC),
    "deepspeed, zero 2, lora": replace(DEEPSPEED, **zero(2, 8), **LORA),
    "deepspeed, zero 3, lora, long": replace(DEEPSPEED, **zero(3, 8), **LORA, micro_batch_size=6),
    "deepspeed, zero 2, mixtral": replace(DEEPSPEED, model=MIXTRAL, **zero(2, 8)),
}
PARAMETERS = ("weights", "adapters", "master weights")
ACTIVATIONS = ("activations", "logits and loss")


@pytest.fixture(scope="module")
def traces() -> dict[str, ExactEstimate]:
    return dict(zip(GRID, estimate_many(list(GRID.values())), strict=True))


def total(parts: dict[str, int], names: tuple[str, ...]) -> int:
    return sum(parts.get(name, 0) for name in names)


def activations_at_the_peak(found: ExactEstimate) -> list[int]:
    """Of the traced peak, and of moments that reach it but for 2 %: which of them is larger is chance."""
    return [
        total(dict(moment.parts), ACTIVATIONS)
        for moment in found.moments
        if moment.total_bytes >= 0.98 * found.peak_bytes
    ]


@pytest.mark.slow
@pytest.mark.parametrize("case", GRID)
@pytest.mark.parametrize("names", [PARAMETERS, ("optimizer",)], ids=["parameters", "optimizer"])
def test_weights_and_optimizer_are_within_2_percent_of_the_trace(
    case: str, names: tuple[str, ...], traces: dict[str, ExactEstimate]
) -> None:
    traced = total(dict(traces[case].states), names)
    assert total(dict(memory.states(GRID[case])), names) == pytest.approx(traced, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("case", GRID)
def test_gradients_are_within_2_percent_of_the_trace(case: str, traces: dict[str, ExactEstimate]) -> None:
    traced = dict(traces[case].states)["gradients"]
    assert dict(memory.states(GRID[case]))["gradients"] == pytest.approx(traced, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("case", GRID)
def test_activations_with_logits_and_loss_are_within_5_percent_of_the_trace(
    case: str, traces: dict[str, ExactEstimate]
) -> None:
    found = total(memory.active(GRID[case]), ACTIVATIONS)
    # In the optimizer's step none are left but a scalar's
    assert any(
        found == pytest.approx(at, rel=0.05, abs=2**15) for at in activations_at_the_peak(traces[case])
    )


@pytest.mark.slow
@pytest.mark.parametrize("case", [name for name in GRID if not name.startswith("deepspeed")])
def test_the_peak_is_within_5_percent_of_the_trace(case: str, traces: dict[str, ExactEstimate]) -> None:
    """Without DeepSpeed, whose buckets no trace has."""
    assert sum(memory.active(GRID[case]).values()) == pytest.approx(traces[case].peak_bytes, rel=0.05)
