"""Work of a step: model FLOPs, what is recomputed, what experts and adapters take."""

from dataclasses import replace

import pytest

from estimator import throughput
from estimator.engines.setups import setup_of
from estimator.job import Job
from estimator.models import find
from estimator.setup import Setup
from estimator.throughput.flops import weights_of, work
from tests.estimator.memory.test_memory import layout_of

LLAMA, MIXTRAL = find("llama-8b"), find("mixtral-8x7b")


def test_full_training_takes_6_flops_per_weight_plus_12_per_attention_term() -> None:
    model = find("llama-2-7b")
    expected = 6 * (model.parameters - 32000 * 4096) + 12 * 32 * 4096 * 2048
    assert throughput.flops_per_token(Setup(model=model, seq_len=2048)) == expected


def test_frozen_weights_take_4_flops_each() -> None:
    full, lora = (
        throughput.flops_per_token(setup_of(Job(model=find("llama-2-7b"), method=method), layout_of()))
        for method in ("full", "lora")
    )
    assert 0.65 < lora / full < 0.72


def test_experts_without_tokens_cost_no_flops() -> None:
    flops = throughput.flops_per_token(Setup(model=MIXTRAL, seq_len=1))
    assert flops < 6.1 * MIXTRAL.active_parameters < 2 * MIXTRAL.parameters


@pytest.mark.parametrize("name", ["llama-8b", "mixtral-8x7b", "deepseek-v3", "gemma-2-9b", "gpt-oss-120b"])
def test_matrix_products_of_a_step_equal_its_model_flops(name: str) -> None:
    """Attention apart, which the work counts as it runs: half for a causal mask, scores computed again."""
    setup = Setup(model=find(name), seq_len=64, micro_batch_size=4)
    done = work(setup)
    products = (done.linear + done.expert + done.head) / setup.tokens
    assert products == pytest.approx(throughput.flops_per_token(setup), rel=0.02)


def test_inputs_and_gradients_of_8_bit_products_are_quantized() -> None:
    setup = Setup(model=LLAMA, engine="torchtitan")
    assert work(setup).quantized == 0
    inputs = 3 * LLAMA.hidden + LLAMA.ffn
    gradients = LLAMA.q_dim + 2 * LLAMA.kv_dim + 2 * LLAMA.hidden + 2 * LLAMA.ffn
    tensorwise, rowwise = (work(replace(setup, fp8=kind)).quantized for kind in ("tensorwise", "rowwise"))
    assert tensorwise == 6 * setup.tokens * LLAMA.layers * (inputs + gradients)
    assert rowwise / tensorwise == 10 / 6


def test_full_checkpointing_repeats_the_forward_pass_of_the_layers_only() -> None:
    plain = work(Setup(model=LLAMA))
    again = work(Setup(model=LLAMA, checkpointing="full"))
    assert again.linear / plain.linear == pytest.approx(4 / 3)
    assert again.attention / plain.attention == pytest.approx(4.5 / 3.5)
    assert again.head == plain.head


def test_selective_checkpointing_repeats_attention_in_megatron_and_products_in_torch() -> None:
    plain = work(Setup(model=LLAMA))
    torch = work(Setup(model=LLAMA, checkpointing="selective", engine="torchtitan"))
    megatron = work(Setup(model=LLAMA, checkpointing="selective", engine="megatron"))
    assert torch.linear > plain.linear == megatron.linear
    assert megatron.attention > plain.attention == torch.attention


def test_a_sliding_window_limits_the_attention_of_its_layers() -> None:
    model = find("mistral-7b")
    windowed = replace(model, sliding_window=4096, sliding_layers=model.layers)
    everything = replace(model, sliding_window=None, sliding_layers=0)
    long = 32768
    assert (
        work(Setup(model=windowed, seq_len=long)).attention
        < work(Setup(model=everything, seq_len=long)).attention / 3
    )
    short = {work(Setup(model=m, seq_len=2048)).attention for m in (windowed, everything)}
    assert len(short) == 1


@pytest.mark.parametrize("length", [4097, 6000, 32768])
def test_tokens_in_a_sliding_window_attend_to_all_tokens_before_them_up_to_the_window(length: int) -> None:
    model = find("mistral-7b")
    windowed = replace(model, sliding_window=4096, sliding_layers=model.layers)
    everything = replace(model, sliding_window=None, sliding_layers=0)
    attention = [work(Setup(model=m, seq_len=length)).attention for m in (windowed, everything)]
    attended = [sum(min(tokens, 4096) for tokens in range(length)), sum(range(length))]
    assert attention[0] / attention[1] == pytest.approx(attended[0] / attended[1], rel=0.001)


def test_attention_sinks_move_no_scores_from_flashattention_3_on() -> None:
    setup = Setup(model=find("gpt-oss-20b"), engine="fsdp2", method="lora", seq_len=4096, attention="flash")
    moved = {version: work(replace(setup, flash_version=version)).moved for version in (2, 3, 4)}
    assert moved[2] > 2 * moved[3]
    assert moved[3] == moved[4]


def test_a_dpo_step_runs_the_reference_model_too() -> None:
    sft, dpo = (work(Setup(model=LLAMA, task=task, micro_batch_size=2)) for task in ("sft", "dpo"))
    assert dpo.linear / sft.linear == pytest.approx(2 * 4 / 3)  # pairs; 1 forward more


def test_weight_counts_by_kind_sum_to_the_model() -> None:
    for model in (LLAMA, MIXTRAL, find("deepseek-v3")):
        weights = weights_of(model)
        linear = (
            weights.dense + weights.one_expert * model.experts - model.layers * model.hidden * model.experts
        )
        assert linear == pytest.approx(weights.linear)


def test_a_dense_mask_makes_attention_compute_every_pair_of_tokens() -> None:
    causal, masked = (work(Setup(model=LLAMA, document_mask=mask)) for mask in (False, True))
    assert (masked.attention, masked.linear) == (pytest.approx(2 * causal.attention), causal.linear)


def test_torchaos_operators_move_more_to_unpack_a_weight_than_one_kernel() -> None:
    qlora = Setup(model=LLAMA, method="lora", quantization="nf4-double")
    assert work(qlora).dequantized / work(replace(qlora, compile=True)).dequantized == pytest.approx(
        33 / 2.516
    )
    assert work(replace(qlora, engine="fsdp2")).dequantized == work(replace(qlora, compile=True)).dequantized


def test_recomputing_the_fp32_loss_copy_does_not_repeat_the_head() -> None:
    plain, again = (work(Setup(model=LLAMA, loss=loss)) for loss in ("plain", "recomputed"))
    assert again.head == plain.head
    assert again.moved > plain.moved


def test_fsdp2_in_one_process_and_deepspeed_without_zero_copy_states() -> None:
    full = Setup(model=LLAMA, engine="fsdp2", precision="bf16-mixed", sharding="fsdp", accumulation=2)
    # 4 + 2 bytes for each of both passes; gradients 2 + 4, 8, and half the time 12
    assert work(full).copied == pytest.approx((12 + 20) * LLAMA.parameters)
    assert work(replace(full, method="lora")).copied == pytest.approx(8 * LLAMA.parameters, rel=0.1)
    alone = replace(full, sharding="none")
    # once in two micro batches 4 + 2 bytes; gradients 2 + 4, and half the time 4
    assert work(alone).copied == pytest.approx((3 + 8) * LLAMA.parameters)
    assert work(replace(alone, precision="bf16")).copied == 0
    zero = replace(full, engine="deepspeed", sharding="zero0")
    assert (work(zero).copied, work(zero).copied_once) == (26 * LLAMA.parameters, 38 * LLAMA.parameters)
    assert work(replace(zero, precision="bf16")).copied_once == 0


def test_attention_over_packed_documents_stays_within_a_document() -> None:
    plain = Setup(model=LLAMA, seq_len=2048, micro_batch_size=4)
    packed = replace(plain, document_tokens=512)
    assert work(packed).attention == pytest.approx(work(plain).attention / 4)
    assert work(packed).linear == work(plain).linear


def test_ligers_kernels_move_fewer_bytes_than_eager_ones() -> None:
    plain = Setup(model=LLAMA, engine="fsdp2", loss="fused")
    liger = replace(plain, engine_version="liger")
    assert 0.3 * work(plain).moved < work(liger).moved < 0.5 * work(plain).moved
    compiled = replace(plain, compile=True)
    assert work(replace(liger, compile=True)).moved == work(compiled).moved


def test_deepspeeds_zero_1_and_2_copy_gradients_to_buckets() -> None:
    zero2 = Setup(model=LLAMA, engine="deepspeed", precision="bf16-mixed", sharding="zero2", shard=8)
    assert (work(zero2).copied, work(zero2).copied_once) == (12 * LLAMA.parameters, 0)
    zero1 = replace(zero2, sharding="zero1")
    assert work(zero1).copied == work(zero2).copied
    assert work(replace(zero2, accumulation=4)).copied == work(zero2).copied
    assert work(replace(zero1, accumulation=4)).copied == work(zero2).copied / 4
    assert work(replace(zero1, engine="megatron")).copied == 0


def test_fp32_layers_between_the_products_of_a_quantized_base_move_more_bytes() -> None:
    qlora = Setup(model=LLAMA, engine="transformers", method="lora", quantization="nf4-double")
    plain, upcast = work(qlora), work(replace(qlora, upcast_frozen=True))
    assert 1.4 * plain.moved < upcast.moved < 2 * plain.moved
    assert (plain.linear, plain.dequantized) == (upcast.linear, upcast.dequantized)


def test_adapters_of_fp32_move_more_bytes_than_those_of_the_base_and_fused_ones_fewer() -> None:
    lora = Setup(model=LLAMA, engine="transformers", method="lora", quantization="nf4")
    fp32, same_type, fused = (
        work(replace(lora, engine_version=version)).moved for version in ("", "peft-0.7", "unsloth")
    )
    assert fp32 > same_type > fused
    full = replace(lora, method="full", quantization="none")
    assert work(full).moved > work(replace(full, engine_version="unsloth")).moved
