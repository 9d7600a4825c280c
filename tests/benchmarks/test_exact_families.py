from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest

from benchmarks import exact_families

pytest.importorskip("torch")
pytest.importorskip("transformers")

# One family for each part of the formulas that another one does not have, and repetitions of its blocks
FAMILIES = {
    "llama4_text": 1,  # norms of queries and keys without weights, all experts
    "deepseek_v3": 1,  # latent attention, router in fp32
    "gpt_oss": 1,  # scores with sinks, computed outside of a kernel
    "granitemoehybrid": 1,  # Mamba 2, shared experts of another width than the others
    "nemotron_h": 1,  # Mamba 2 in rows of several chunks, blocks of one part
    "qwen3_next": 1,  # gated delta rule, dense blocks among those with experts, a gate of the shared expert
    "phi": 4,  # attention and MLP read the same norm
    "falcon": 4,  # one key head, computed outside of a kernel
}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_formulas_agree_with_the_trace_of_a_model_of_another_size(family: str) -> None:
    model = exact_families.small_model(family, scale=4, repeats=FAMILIES[family])
    if model.recurrence:  # so that values and keys differ in width
        model = replace(model, recurrent_head_dim=2 * model.recurrent_head_dim)
    methods: tuple[Literal["full", "lora"], ...] = ("full", "lora")
    rows = [exact_families.compare(model, "other", method, seq_len=384) for method in methods]
    assert [row.refused for row in rows] == ["", ""]
    assert [row.activations for row in rows] == pytest.approx([0, 0], abs=0.02)
    assert [row.states for row in rows] == pytest.approx([0, 0], abs=exact_families.GOALS["states"])


@pytest.mark.parametrize(("kv_heads", "norms"), [(2, 2), (2, 1), (8, 1)])
def test_falcons_with_more_key_heads_repeat_them_and_cast_the_mask(kv_heads: int, norms: int) -> None:
    small = exact_families.small_model("falcon")
    model = replace(small, heads=8, kv_heads=kv_heads, head_dim=small.hidden // 8, norms_per_layer=norms)
    row = exact_families.compare(model, "other", "lora", seq_len=384)
    assert (row.refused, row.activations) == ("", pytest.approx(0, abs=0.02))
