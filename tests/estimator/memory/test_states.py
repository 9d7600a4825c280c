"""Parts of the memory estimate, each against what its source says."""

from dataclasses import replace
from typing import Any

import pytest

from estimator import memory, models
from estimator.memory.shape import part_of
from estimator.memory.states import base_bytes, loaded_bytes, scale_bytes
from estimator.models import find
from estimator.plan import GIB
from estimator.setup import LlamaAdapter
from tests.estimator.memory.llama_step import LLAMA, step


@pytest.mark.parametrize("tensor", [2, 4, 8])
def test_tensor_parallelism_divides_all_weights_except_norms(tensor: int) -> None:
    whole = sum(memory.states(step(engine="torchtitan")).values())
    part = sum(memory.states(step(engine="torchtitan", tensor=tensor)).values())
    assert whole / tensor < part < whole / tensor * 1.001


@pytest.mark.parametrize(
    ("fp8", "bytes_a_parameter"), [("msamp-o1", 11), ("msamp-o2", 6), ("msamp-o3", 7), ("te", 16)]
)
def test_ms_amp_levels_match_the_table_of_accelerate(fp8: Any, bytes_a_parameter: int) -> None:
    states = memory.states(step(engine="transformers", precision="bf16-autocast", fp8=fp8))
    assert sum(states.values()) == bytes_a_parameter * LLAMA.parameters


@pytest.mark.parametrize("engine", ["litgpt", "deepspeed", "fsdp2"])
def test_an_adapter_v2_counts_the_norms_that_it_trains_once(engine: Any) -> None:
    setup = step(engine=engine, method="adapter-v2")
    held, norms = memory.states(setup), (2 * LLAMA.layers + 1) * LLAMA.hidden
    assert held["weights"] == 2 * (LLAMA.parameters - norms)
    assert held["adapters"] == held["gradients"] == 2 * setup.trainable_parameters
    assert memory.states(replace(setup, method="adapter-v1"))["weights"] == 2 * LLAMA.parameters


@pytest.mark.parametrize("engine", ["litgpt", "deepspeed", "fsdp2"])
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_adapter_v1_saves_less_than_lora_and_v2_more(engine: Any, checkpointing: Any) -> None:
    needs = [
        memory.active(step(engine=engine, method=method, checkpointing=checkpointing))["activations"]
        for method in ("adapter-v1", "lora", "adapter-v2")
    ]
    assert needs == sorted(needs)


def test_blocks_below_the_first_prompt_save_nothing_with_llama_adapter_v1() -> None:
    first, half, last = (
        memory.active(
            step(engine="fsdp2", method="adapter-v1", llama_adapter=LlamaAdapter(start_layer=start))
        )["activations"]
        for start in (0, LLAMA.layers // 2, LLAMA.layers - 1)
    )
    assert first / half == pytest.approx(2, rel=0.05)
    assert last < half / 8
    second = [
        memory.active(
            step(engine="fsdp2", method="adapter-v2", llama_adapter=LlamaAdapter(start_layer=start))
        )["activations"]
        for start in (0, LLAMA.layers - 1)
    ]
    assert second[1] > 0.9 * second[0], "norms and scales are in every block"


def test_full_dpo_holds_a_reference_model_and_two_sequences_per_pair() -> None:
    dpo = step(task="dpo")
    assert memory.states(dpo)["reference model"] == 2 * LLAMA.parameters
    assert memory.states(step(task="dpo", method="lora"))["reference model"] == 0
    assert memory.active(dpo)["activations"] > 1.9 * memory.active(step())["activations"]


def test_expert_parallelism_over_8_processes_holds_at_least_an_eighth_of_all_states() -> None:
    model = find("mixtral-8x7b")
    base = step(model=model, engine="megatron", precision="bf16-mixed", sharding="zero1", shard=8)
    spread = replace(base, expert=8)
    assert sum(memory.states(spread).values()) >= 18 * model.parameters / 8
    assert memory.states(spread)["weights"] < memory.states(base)["weights"] / 4


def test_fsdp1_keeps_unsharded_gradients_of_frozen_weights_during_accumulation() -> None:
    """Fabric's no_backward_sync over flat parameters: 12.5 GiB of Llama 2 7B on two GPUs, as was measured."""
    lora = step(model=find("llama-2-7b"), engine="litgpt", method="lora", sharding="fsdp", shard=2)
    assert memory.states(replace(lora, accumulation=8))["gradients"] / GIB == pytest.approx(12.06, abs=0.1)
    assert memory.states(lora)["gradients"] / GIB == pytest.approx(6.03, abs=0.1)


@pytest.mark.parametrize(("engine", "size"), [("fsdp2", 4), ("torchtune", 2)])
def test_gradients_of_adapters_stay_unsharded_during_accumulation(engine: Any, size: int) -> None:
    precision: Any = "bf16-mixed" if engine == "fsdp2" else "bf16"
    lora = step(engine=engine, method="lora", precision=precision, sharding="fsdp", shard=8)
    several = replace(lora, accumulation=4)
    assert memory.states(several)["gradients"] == size * lora.trainable_parameters
    assert memory.states(lora)["gradients"] == memory.states(several)["gradients"] // 8
    full = replace(lora, method="full")
    assert memory.states(replace(full, accumulation=4))["gradients"] == memory.states(full)["gradients"]


def test_paged_states_take_no_gpu_memory_and_8_bit_states_a_quarter() -> None:
    full = memory.states(step(precision="fp32"))["optimizer"]
    assert memory.states(step(precision="fp32", optimizer="paged-adamw8bit"))["optimizer"] == 0
    eight = memory.states(step(precision="fp32", optimizer="adamw8bit"))["optimizer"]
    assert eight == pytest.approx(full / 4, rel=0.02)


@pytest.mark.parametrize("name", models.names())
def test_a_single_process_counts_every_parameter_once(name: str) -> None:
    model = models.find(name)
    assert memory.states(step(model=model))["weights"] == 2 * model.parameters


LINEAR = LLAMA.layers * (
    2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 14336 * 4096
)  # weights of all blocks' layers
ROWS = LLAMA.layers * (2 * 4096 + 2 * 1024 + 2 * 14336 + 4096)


@pytest.mark.parametrize(
    ("quantization", "packed", "scales"),
    [
        ("nf4-double", LINEAR // 2, LINEAR / 64 + 4 * LINEAR / (64 * 256)),
        ("nf4", LINEAR // 2, 4 * LINEAR / 64),
        ("int8", LINEAR, 4 * ROWS),
    ],
)
@pytest.mark.parametrize(
    ("engine", "sharding"), [("deepspeed", "zero2"), ("deepspeed", "zero3"), ("fsdp2", "fsdp")]
)
def test_sharding_divides_quantized_weights_but_not_their_scales(
    engine: Any, sharding: Any, quantization: Any, packed: int, scales: float
) -> None:
    setup = step(engine=engine, sharding=sharding, shard=4, method="lora", quantization=quantization)
    part = part_of(setup, "only")
    rest = base_bytes(setup, part, 2) - packed
    assert rest == 2 * (LLAMA.parameters - LINEAR)
    divided = 1 if sharding == "zero2" else 4
    assert scale_bytes(setup, part) == pytest.approx(scales, rel=1e-6)
    assert memory.states(setup)["weights"] == pytest.approx((packed + rest) / divided + scales, rel=1e-6)


def test_with_zero_3_each_process_loads_the_complete_quantized_base() -> None:
    setup = step(engine="deepspeed", sharding="zero3", shard=64, method="lora", quantization="nf4")
    part = part_of(setup, "only")
    assert loaded_bytes(setup, part) == base_bytes(setup, part, 2) + scale_bytes(setup, part)
    assert loaded_bytes(replace(setup, engine="fsdp2", sharding="fsdp"), part) == 0
