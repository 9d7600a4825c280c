"""Published tables and rules of thumb, and the assumption under which each holds.

Accelerate's table: Z. Mueller, "Scaling Model Training with More Compute, How Do They Do It?"
(huggingface.co/spaces/muellerzr/llm-conf), made with `accelerate estimate-memory`. It takes the largest of
its columns for the need; ours adds up what is in memory at once.
"""

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.estimators import nanotron_bytes
from estimator import hardware, memory
from estimator.models import find
from estimator.plan import GIB
from estimator.setup import Setup


@pytest.mark.parametrize("model", ["bert-base-cased", "llama-3-8b"])
@pytest.mark.parametrize(
    ("changes", "bytes_a_parameter"),
    [
        ({"precision": "fp32", "engine": "transformers"}, 16),
        # fp32 weights, gradients and moments together; the 16-bit copies that autocast makes are activations
        ({"precision": "bf16-autocast", "engine": "transformers"}, 16),
        ({"precision": "fp16-autocast", "engine": "transformers"}, 16),
        ({"precision": "bf16", "engine": "torchtune"}, 8),
    ],
)
def test_states_match_the_bytes_per_parameter_of_the_accelerate_table(
    model: str, changes: dict[str, Any], bytes_a_parameter: int
) -> None:
    states = memory.states(Setup(model=find(model), **changes))
    assert sum(states.values()) == pytest.approx(bytes_a_parameter * find(model).parameters, rel=0.01)
    assert states["optimizer"] == bytes_a_parameter * find(model).parameters // 2


@pytest.mark.parametrize(
    ("gpu", "model", "changes"),
    [
        # Full training of 7B on a card of 24 GB: the moments are in host memory, gradients are used at once
        (
            "L4",
            "llama-2-7b",
            {"optimizer": "paged-adamw", "optimizer_in_backward": True, "micro_batch_size": 2},
        ),
        ("L4", "llama-2-7b", {"method": "lora"}),
        ("RTX 4090", "mistral-7b", {"method": "lora"}),
        ("RTX A4000", "llama-2-7b", {"method": "lora", "quantization": "nf4-double"}),
    ],
)
def test_a_7b_model_fits_the_gpus_named_by_rules_of_thumb(
    gpu: str, model: str, changes: dict[str, Any]
) -> None:
    """With checkpointing, a chunked loss and sequences of 2,048 tokens."""
    setup = Setup(model=find(model), checkpointing="full", loss="chunked", **changes)
    assert memory.estimate(setup).needs_bytes < hardware.gpu(gpu).usable_bytes


def test_70b_full_with_adamw_fills_8_cards_of_80_gb() -> None:
    """8 bytes a parameter are 64 of 80 GiB each: the rule holds, at 2,048 tokens, to a tenth of a card."""
    setup = Setup(model=find("llama-2-70b"), sharding="fsdp", shard=8, checkpointing="full")
    assert 64 * GIB < sum(memory.states(setup).values()) < 65 * GIB
    assert 0.9 < memory.estimate(setup).needs_bytes / hardware.gpu("A100 SXM 80GB").usable_bytes < 1


def test_the_ultra_scale_playbook_formula_reproduces_its_charts() -> None:
    """Ultra-Scale Playbook, cp_8Bmemoryusage: Llama 8B without parallelism.

    Activations 4.25 GiB at 1,024 tokens, 17 at 4,096; parameters 14.957 GiB, gradients too, moments 4 times.
    """
    setup = Setup(model=find("llama-8b"), precision="bf16-mixed", seq_len=1024)
    short, long = nanotron_bytes(setup), nanotron_bytes(replace(setup, seq_len=4096))
    assert (long - short) / GIB == pytest.approx(17 - 4.25)
    master = 4 * setup.model.parameters  # its formula has it, its charts leave it out
    assert (short - master) / GIB == pytest.approx(6 * 14.957 + 4.25, rel=1e-3)
