"""Traces against what can be counted by hand, and against the same step on real tensors."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import cache

import pytest

from estimator.exact.process import _estimate
from estimator.exact.result import ExactEstimate
from estimator.models import find, names
from estimator.setup import Setup
from tests.estimator.exact.shapes import (
    DEEPSPEED,
    LLAMA,
    MIXTRAL,
    NARROW,
    TORCHTITAN,
    TORCHTUNE,
    TRANSFORMERS,
    fsdp,
    zero,
)
from tests.estimator.models.hf_configs import with_layers

pytest.importorskip("torch")
pytestmark = pytest.mark.filterwarnings("ignore")  # as in the worker


@cache
def traced(setup: Setup) -> ExactEstimate:
    """In this process, as the worker does it in its own."""
    from estimator.exact.trace import trace

    return _estimate(trace(setup))


def moment(found: ExactEstimate, name: str) -> dict[str, int]:
    return next(dict(each.parts) for each in found.moments if each.name == name)


def kept(setup: Setup) -> float:
    """Bytes that one more block keeps for the backward pass, for one token."""
    more = replace(setup, model=replace(setup.model, layers=setup.model.layers + 1))
    ends = [moment(traced(each), "backward, last norm")["activations"] for each in (setup, more)]
    return (ends[1] - ends[0]) / setup.tokens


@pytest.mark.slow
@pytest.mark.parametrize(
    "setup",
    [
        replace(TORCHTUNE, model=NARROW, seq_len=64),
        replace(TORCHTUNE, model=NARROW, seq_len=64, checkpointing="full", accumulation=2),
        replace(TORCHTUNE, model=NARROW, seq_len=64, method="lora", loss="plain"),
        replace(TRANSFORMERS, model=NARROW, seq_len=64),
        replace(TRANSFORMERS, model=NARROW, seq_len=64, precision="bf16-autocast"),
        replace(DEEPSPEED, model=NARROW, seq_len=64, method="lora", checkpointing="full", **zero(2, 2)),
    ],
    ids=["torchtune", "checkpointing", "lora", "transformers", "autocast", "deepspeed"],
)
def test_fake_tensors_count_the_same_bytes_as_real_ones(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    from estimator.exact import trace

    fake = traced(setup)
    monkeypatch.setattr(trace, "FakeTensorMode", nullcontext)
    assert traced.__wrapped__(setup).moments == fake.moments


def test_pure_bf16_training_takes_8_bytes_per_parameter_and_a_step_count_per_tensor() -> None:
    found = traced(TORCHTUNE)
    states, tensors = dict(found.states), 9 * LLAMA.layers + 3
    assert found.parameters == found.trainable_parameters == LLAMA.parameters
    assert states["weights"] == states["gradients"] == 2 * LLAMA.parameters
    assert states["optimizer"] == 4 * LLAMA.parameters + 4 * tensors


def test_only_adapters_have_gradients_and_optimizer_states() -> None:
    found = traced(replace(TORCHTUNE, method="lora"))
    states, adapters = dict(found.states), LLAMA.lora_parameters(8, TORCHTUNE.lora_targets)
    assert found.trainable_parameters == adapters
    assert states["weights"] == 2 * LLAMA.parameters
    assert states["adapters"] == states["gradients"] == 2 * adapters


def test_4_bit_weights_take_half_a_byte_and_their_scales() -> None:
    states = dict(traced(replace(TORCHTUNE, method="lora", quantization="nf4-double")).states)
    rest = LLAMA.parameters - LLAMA.linear_parameters
    assert states["weights"] == LLAMA.linear_parameters // 2 + 2 * rest
    assert states["quantization overhead"] == pytest.approx(
        LLAMA.linear_parameters * (1 / 64 + 4 / 64 / 256), rel=0.01
    )


@pytest.mark.parametrize("processes", [2, 8, 128])
def test_fsdp_shards_sum_to_the_complete_states(processes: int) -> None:
    whole = dict(traced(TORCHTUNE).states)
    parts = dict(traced(replace(TORCHTUNE, **fsdp(processes))).states)
    for name in ("weights", "gradients"):
        assert parts[name] * processes == whole[name]


def test_zero_states_are_computed_and_marked_as_computed() -> None:
    found = traced(replace(DEEPSPEED, **zero(3, 8)))
    assert sum(dict(found.states)[name] for name in found.from_formula if name in dict(found.states)) == (
        16 * LLAMA.parameters // 8
    )


@pytest.mark.slow
def test_each_additional_block_adds_the_same_bytes_in_every_phase() -> None:
    for setup in (TORCHTUNE, replace(TORCHTITAN, checkpointing="full", **fsdp(8))):
        found = [traced(replace(setup, model=replace(LLAMA, layers=layers))) for layers in (6, 7, 8)]
        for one, two, three in zip(*(each.moments for each in found), strict=True):
            assert two.total_bytes - one.total_bytes == three.total_bytes - two.total_bytes


# h hidden, q all query heads, kv all key or value heads, f MLP; in bytes for each token
H, Q, KV, F = LLAMA.hidden, LLAMA.q_dim, LLAMA.kv_dim, LLAMA.ffn
LSE, ROOTS = 4 * LLAMA.heads, 2 * 4  # fp32: of the softmax's rows, of the two norms


def test_a_torchtitan_block_with_fused_norms_saves_8h_8q_and_8f() -> None:
    assert kept(replace(TORCHTITAN, precision="bf16")) == 8 * H + 8 * Q + 8 * F + LSE + ROOTS


def test_a_compiled_block_saves_8h_8q_and_6f() -> None:
    assert kept(replace(TORCHTUNE, compile=True)) == 8 * H + 8 * Q + 6 * F + LSE + ROOTS


def test_a_compiled_loss_saves_no_fp32_copies_of_the_chunks() -> None:
    eager, compiled = (moment(traced(replace(TORCHTUNE, compile=flag)), "loss") for flag in (False, True))
    logits = TORCHTUNE.tokens * LLAMA.vocab
    assert eager["logits and loss"] > 6 * logits
    assert compiled["logits and loss"] < 2.2 * logits


@pytest.mark.slow
@pytest.mark.nightly
def test_compilation_does_not_change_the_states() -> None:
    for setup in (TORCHTUNE, replace(TORCHTUNE, method="lora", **fsdp(8))):
        assert traced(replace(setup, compile=True)).states == traced(setup).states


def test_weights_are_not_sharded_if_only_gradients_and_optimizer_are() -> None:
    gathered, freed = (
        moment(traced(replace(TORCHTITAN, sharding=sharding, shard=8)), "loss")["communication buffers"]
        for sharding in ("shard_grad_op", "fsdp")
    )
    assert gathered - freed == 2 * (LLAMA.layers - 1) * LLAMA.layer_parameters  # the last stays anyway


def test_a_checkpointed_block_saves_only_its_input() -> None:
    assert kept(replace(TORCHTUNE, checkpointing="full")) == 2 * H


def test_frozen_norms_save_less_and_adapters_save_their_low_rank_results() -> None:
    assert kept(replace(TORCHTUNE, method="lora")) == 12 * H + 8 * Q + 8 * F + LSE + ROOTS + 7 * 2 * 8


def test_each_token_saves_the_activations_of_its_two_experts() -> None:
    setup = replace(TRANSFORMERS, model=MIXTRAL)
    router = kept(setup) - (16 * H + 4 * Q + 4 * KV + LSE + ROOTS) - 2 * (4 * H + 8 * MIXTRAL.ffn)
    assert 4 * MIXTRAL.experts <= router < 200


def test_gradients_of_earlier_micro_batches_are_live_during_the_forward_pass() -> None:
    once, twice = traced(TORCHTUNE), traced(replace(TORCHTUNE, accumulation=4))
    assert "gradients" not in moment(once, "forward")
    assert moment(twice, "forward")["gradients"] == 2 * LLAMA.parameters


def test_an_optimizer_in_the_backward_pass_leaves_no_gradients() -> None:
    assert "gradients" not in dict(traced(replace(TORCHTUNE, optimizer_in_backward=True)).states)


def test_the_plain_loss_takes_12_bytes_per_logit_and_the_chunked_one_less() -> None:
    logits = TORCHTUNE.tokens * LLAMA.vocab
    plain = traced(replace(TORCHTUNE, loss="plain")).categories["logits and loss"]
    assert plain == pytest.approx(12 * logits, rel=0.001)
    assert traced(TORCHTUNE).categories["logits and loss"] < 7 * logits


def test_tensor_parallelism_of_2_halves_split_weights_and_activations() -> None:
    alone, split = traced(TORCHTUNE), traced(replace(TORCHTUNE, tensor=2, sequence_parallel=False))
    norms = 2 * LLAMA.hidden * (2 * LLAMA.layers + 1)
    assert 2 * (dict(split.states)["weights"] - norms) == dict(alone.states)["weights"] - norms
    assert kept(replace(TORCHTUNE, tensor=2)) == 20 * H + (8 * Q + 8 * F + LSE) / 2 + ROOTS


def test_states_of_gpu_only_optimizers_are_computed_and_marked_as_computed() -> None:
    found = traced(replace(TORCHTUNE, optimizer="adamw8bit"))
    assert found.from_formula == ("optimizer",)
    assert 2 * LLAMA.parameters < dict(found.states)["optimizer"] < 2.1 * LLAMA.parameters
    assert any("adamw8bit" in clause for clause in found.unmodeled)
    assert any("CUDA context" in clause for clause in found.unmodeled)


FAMILIES = {find(name).family: name for name in reversed(names())}
UNBUILT = {"qwen", "bert"}  # no class in transformers; no next-token loss


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - UNBUILT))
def test_every_decoder_of_the_table_is_built_by_transformers_and_traced(family: str) -> None:
    model = find(FAMILIES[family])
    # of Gemma 4's ten, some of both kinds share keys and values
    model = with_layers(model, 10 if model.global_head_dim else 2 * (model.recurrent_layers > 0) + 2)
    assert traced(replace(TRANSFORMERS, model=model, seq_len=64)).parameters == model.parameters
