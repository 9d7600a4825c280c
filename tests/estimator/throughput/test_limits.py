"""Exact seconds of a step with round coefficients, and each limit at its edge."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from estimator import hardware
from estimator.memory.generation import Batch
from estimator.models import find
from estimator.setup import Setup
from estimator.throughput import (
    HOST_ADAM,
    kernel_seconds,
    launch_seconds,
    optimizer_seconds,
    step,
)
from estimator.throughput.communication import (
    Links,
    Times,
    collective_seconds,
    communication_seconds,
    volumes,
)
from estimator.throughput.efficiency import Coefficient, Efficiency, best_product, published
from estimator.throughput.flops import Work, weights_of
from estimator.throughput.generation import balanced_sequences, generation_speed
from estimator.throughput.launches import in_block, of_optimizer, outside

LLAMA, MIXTRAL, DEEPSEEK = find("llama-8b"), find("mixtral-8x7b"), find("deepseek-v3")
H100 = hardware.gpu("H100 SXM")
GPU = replace(H100, measured_tflops=100.0, bandwidth_gbps=1000.0)
TABLE = Efficiency(
    {
        (name, "*"): Coefficient(value, 0, "test")
        for name, value in {
            "products": 0.5,
            "grouped products": 0.5,
            "attention": 0.5,
            "masked attention": 0.5,
            "moved": 2.0,
            "dequantized": 3.0,
            "gain": 2.0,
            "launch": 0.01,
            "launch of experts": 0.02,
            "launch of adapters": 0.03,
            "launch of tensor": 0.04,
            "launch on Grace": 3.0,
            "optimizer": 2.0,
            "overlap": 1.0,
            "hop": 0.0,
            "exposed tensor": 0.5,
            "exposed expert": 0.25,
        }.items()
    }
)
LOAD = Work(
    linear=8e14,
    expert=4e14,
    head=1e14,
    attention=2e14,
    moved=3e11,
    weights=2e11,
    dequantized=1e11,
    quantized=0.0,
    copied=1e11,
    copied_once=5e10,
    layers=10.0,
    offloaded=0.0,
    trained=10**9,
    model_flops_per_token=1.0,
)
LAUNCHES = replace(  # nothing but the launches of the blocks' kernels
    LOAD,
    **dict.fromkeys(("linear", "expert", "head", "attention", "moved", "weights"), 0.0),
    **dict.fromkeys(("dequantized", "copied", "copied_once", "trained"), 0.0),
)
SLOW = Links(intra_bytes_per_s=1e9, inter_bytes_per_s=1e8, domain=8)


def test_kernel_times_are_work_divided_by_rates() -> None:
    found = kernel_seconds(Setup(model=LLAMA), LOAD, GPU, TABLE)
    assert found.products == pytest.approx(9e14 / 5e13 + 4e14 / 2.5e13 + 0.2)
    assert (found.attention, found.memory_bound) == (pytest.approx(8.0), pytest.approx(0.8 + 0.3))
    assert found.total == pytest.approx(34.2 + 8.0 + 1.1)
    assert found.times(3).total == pytest.approx(3 * found.total)
    masked = kernel_seconds(Setup(model=LLAMA, document_mask=True), LOAD, GPU, TABLE)
    assert masked.attention == pytest.approx(16.0)
    plain = kernel_seconds(Setup(model=LLAMA, document_mask=True, attention="math"), LOAD, GPU, TABLE)
    assert plain.attention == pytest.approx(8.0)
    fp8 = kernel_seconds(Setup(model=LLAMA, fp8="rowwise"), LOAD, GPU, TABLE)
    assert fp8.products == pytest.approx((4e14 + 1e14) / 5e13 + 2e14 / 2.5e13 + 0.2)


@pytest.mark.parametrize(
    ("changes", "seconds"),
    [
        ({"model": LLAMA}, 0.1),
        ({"model": LLAMA, "method": "lora", "tensor": 2}, 0.8),
        ({"model": MIXTRAL}, 0.3),
    ],
)
def test_experts_adapters_and_tensor_parallelism_add_launch_time(
    changes: dict[str, Any], seconds: float
) -> None:
    assert launch_seconds(Setup(**changes), LOAD, TABLE) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("changes", "parameters"),
    [
        ({"sharding": "ddp", "replicate": 4, "tensor": 2, "pipeline": 2}, 10**9 / 4),
        ({"sharding": "fsdp", "shard": 4, "tensor": 2}, 10**9 / 8),
    ],
)
def test_an_optimizer_step_moves_the_states_of_one_process(
    changes: dict[str, Any], parameters: float
) -> None:
    setup = Setup(model=LLAMA, precision="bf16-mixed", **changes)
    moved = parameters * 28 + 5e10
    assert optimizer_seconds(setup, LOAD, GPU, TABLE) == pytest.approx(moved * 2 / 1e12)
    pure = replace(setup, precision="bf16")
    assert optimizer_seconds(pure, LOAD, GPU, TABLE) == pytest.approx((parameters * 14 + 5e10) * 2 / 1e12)
    on_host = replace(setup, offload="optimizer", processes_per_node=4)
    seconds = parameters * 4 / HOST_ADAM + parameters * 4 / 50e9
    assert optimizer_seconds(on_host, LOAD, GPU, TABLE) == pytest.approx(seconds)


@pytest.mark.parametrize(("missing", "paged"), [(0, 0), (10**9, 10**9), (9 * 10**9, 8 * 10**9)])
def test_a_paged_optimizer_transfers_states_that_do_not_fit_in_both_directions(
    missing: int, paged: int
) -> None:
    setup = Setup(model=LLAMA, optimizer="paged-adamw")
    needed = 2 * LLAMA.parameters + 2 * 10**9 + 8 * 10**9  # weights and gradients in bf16, two fp32 moments
    card = replace(GPU, vram_bytes=needed - missing, driver_bytes=0)
    plain = optimizer_seconds(replace(setup, optimizer="adamw"), LOAD, card, TABLE)
    assert optimizer_seconds(setup, LOAD, card, TABLE) - plain == pytest.approx(2 * paged / 50e9)


def test_a_step_is_micro_batches_plus_exposed_communication_and_bubble() -> None:
    setup = Setup(
        model=LLAMA,
        tensor=2,
        sharding="fsdp",
        shard=2,
        pipeline=2,
        virtual_stages=2,
        schedule="interleaved",
        accumulation=4,
        activation_offload=True,
    )
    load = replace(LOAD, offloaded=1e11)
    times = communication_seconds(setup, SLOW)
    assert min(times.tensor, times.gather, times.pipeline) > 0
    step_seconds = step(setup, load, GPU, times, TABLE)
    busy = kernel_seconds(setup, load, GPU, TABLE).total + 0.5
    micro = busy + times.tensor / 2 + times.overlapped + 1e11 / 50e9
    assert step_seconds.compute == pytest.approx(4 * busy)
    assert step_seconds.communication == pytest.approx(4 * micro + times.reduced_per_step - 4 * busy)
    assert step_seconds.bubble == pytest.approx(micro / 2)
    assert step_seconds.total == pytest.approx(
        4 * micro + times.reduced_per_step + micro / 2 + step_seconds.optimizer
    )


def test_deepspeed_gathers_updated_weights_behind_the_optimizer() -> None:
    setup = Setup(model=LLAMA, engine="deepspeed", precision="bf16-mixed", sharding="zero1", shard=8)
    times = replace(communication_seconds(setup, SLOW), reduce_step=0.0)
    overlap = Efficiency({**TABLE.table, ("overlap", "*"): Coefficient(8.0, 0, "")})
    deepspeed = step(setup, LOAD, GPU, times, overlap)
    assert deepspeed.communication == pytest.approx(times.gather_step)
    megatron = step(replace(setup, engine="megatron"), LOAD, GPU, times, overlap)
    assert megatron.communication < 0.5 * times.gather_step


def test_looped_experts_run_dense_products_and_wait_for_their_launches() -> None:
    setup = Setup(model=MIXTRAL, engine="transformers")
    looped = replace(setup, looped_experts=True)
    grouped, dense = (kernel_seconds(each, LOAD, GPU, TABLE) for each in (setup, looped))
    assert dense.products - grouped.products == pytest.approx(4e14 / 5e13 - 4e14 / 2.5e13)
    times = communication_seconds(setup, SLOW)
    overlap = Efficiency({**TABLE.table, ("overlap", "*"): Coefficient(8.0, 0, "")})
    waited = step(looped, LOAD, GPU, times, overlap).compute - dense.total
    assert waited == pytest.approx(10 * overlap.of("launch of experts"), rel=0.01)


def test_an_all_to_all_sends_a_token_once_for_each_of_its_experts() -> None:
    setup = Setup(model=DEEPSEEK, engine="megatron", expert=64, sharding="zero1", shard=64)
    setup = replace(setup, processes_per_node=8)
    once, by_expert = (replace(setup, dispatch_by_expert=value) for value in (False, True))
    assert (once.token_copies, by_expert.token_copies) == (DEEPSEEK.experts_per_token, 1)
    assert setup.token_copies == once.token_copies
    assert replace(setup, engine="torchtitan", sharding="fsdp").token_copies == 1
    seconds = {}
    for each in (once, by_expert):
        times = communication_seconds(each, SLOW)
        assert times is not None
        seconds[each] = times.expert
    assert seconds[once] == pytest.approx(seconds[by_expert] * 7 * (1 - (7 / 8) ** 8) / 8 / (7 / 8))


def test_a_grace_host_launches_kernels_more_slowly() -> None:
    setup = Setup(model=LLAMA)
    times = communication_seconds(setup, SLOW)
    assert times is not None
    x86, grace = (step(setup, LAUNCHES, replace(GPU, name=name), times, TABLE) for name in ("H200", "GH200"))
    assert grace.compute == pytest.approx(3 * x86.compute)


def test_zero3_in_one_process_launches_no_collectives() -> None:
    table = Efficiency({**TABLE.table, ("launch", "deepspeed zero3 alone"): Coefficient(0.005, 0, "")})
    alone = Setup(model=LLAMA, engine="deepspeed", sharding="zero3")
    assert launch_seconds(alone, LOAD, table) == pytest.approx(0.05)
    assert launch_seconds(replace(alone, shard=2), LOAD, table) == pytest.approx(0.1)


def test_offloaded_weights_are_copied_for_forward_and_backward_passes() -> None:
    setup = Setup(model=LLAMA, engine="fsdp2", sharding="fsdp", shard=4, offload="all")
    times = communication_seconds(setup, SLOW)
    resident = step(replace(setup, offload="optimizer"), LOAD, GPU, times, TABLE)
    step_seconds = step(setup, LOAD, GPU, times, TABLE)
    copied = 2 * LLAMA.parameters * 2 / 4 / 50e9
    assert step_seconds.communication - resident.communication == pytest.approx(copied)


def test_only_layers_with_experts_exchange_tokens() -> None:
    setup = Setup(model=DEEPSEEK, expert=8, sharding="fsdp", shard=8, engine="torchtitan", seq_len=1024)
    blocks = DEEPSEEK.layers - DEEPSEEK.dense_layers
    sent = 1024 * DEEPSEEK.hidden * 2 * DEEPSEEK.experts_per_token * blocks
    assert DEEPSEEK.dense_layers > 0
    assert volumes(setup).expert == pytest.approx(4 * sent)
    assert volumes(replace(setup, checkpointing="full")).expert == pytest.approx(6 * sent)
    staged = replace(setup, pipeline=2, schedule="1f1b", accumulation=2)
    stage = -(-DEEPSEEK.layers // 2) / DEEPSEEK.layers
    assert volumes(staged).expert == pytest.approx(4 * sent * stage)
    assert volumes(replace(setup, expert=1)).expert == 0
    shared, whole = (volumes(replace(setup, expert=n)).gather for n in (8, 1))
    routed = DEEPSEEK.experts * blocks * 3 * DEEPSEEK.hidden * DEEPSEEK.ffn
    assert whole - shared == pytest.approx(2 * 2 * routed * (1 - 1 / 8))


def test_an_all_to_all_sends_copies_once_per_domain() -> None:
    fast = Links(intra_bytes_per_s=1e12, inter_bytes_per_s=10.0, domain=8)
    # Four domains; three others, each reached by at least one of two receivers with 1 - (3/4)^2
    assert fast.exchange(800.0, 32, copies=2) == pytest.approx(800 / 2 * 3 * (1 - 0.75**2) * 8 / 10)
    narrow = Links(intra_bytes_per_s=100.0, inter_bytes_per_s=1e12, domain=8)
    assert narrow.exchange(800.0, 32, stride=2) == pytest.approx(800 * 3 / 32 / 100)
    # Seven other processes of the node, each reached by at least one of two receivers with 1 - (7/8)^2
    assert narrow.exchange(800.0, 8, copies=2) == pytest.approx(800 / 2 * 7 * (1 - (7 / 8) ** 2) / 100)
    assert narrow.ring(800.0, 32, stride=16) == pytest.approx(800 * 31 / 32 * 8 / 1e12)


def test_collectives_are_counted_per_micro_batch_and_by_zero_operation() -> None:
    times = Times(
        hops=0,
        hops_step=0,
        tensor=2.0,
        expert=3.0,
        context=5.0,
        gather=7.0,
        reduce=1.0,
        pipeline=11.0,
        gather_step=4.0,
        reduce_step=0.5,
        replicas_step=13.0,
    )
    assert (times.overlapped, times.reduced_per_step) == (24.0, 13.5)
    setup = Setup(model=LLAMA, sharding="fsdp", shard=2, accumulation=2)
    assert dict(collective_seconds(setup, times)) == {
        "all_gather": 20.0,
        "reduce_scatter": 4.5,
        "all_reduce": 13.0,
        "all_to_all": 6.0,
        "send and receive": 32.0,
    }
    zero = dict(collective_seconds(replace(setup, sharding="zero1", engine="deepspeed"), times))
    assert (zero["all_gather"], zero["reduce_scatter"], zero["all_reduce"]) == (20.0, 2.0, 15.5)


def test_the_best_product_is_the_measured_rate_else_a_share_of_the_peak() -> None:
    gpu = replace(GPU, peak_tflops=(("bf16", 200.0), ("fp32", 50.0)))
    assert best_product(gpu, "bf16", TABLE) == 100e12
    assert best_product(gpu, "fp32", TABLE) == pytest.approx(50e12 * 100 / 200)
    unmeasured = replace(gpu, measured_tflops=None)
    assert best_product(unmeasured, "bf16", TABLE) is None
    usual = Efficiency({("best product", str(gpu.architecture)): Coefficient(0.8, 0, "test")})
    assert best_product(unmeasured, "bf16", usual) == pytest.approx(160e12)
    assert balanced_sequences(gpu) == 200
    assert balanced_sequences(replace(gpu, bandwidth_gbps=None)) is None


def test_replicas_communicate_across_sharding_groups() -> None:
    setup = Setup(model=LLAMA, sharding="fsdp", shard=4, replicate=2, tensor=2)
    times = communication_seconds(setup, SLOW)
    # Two replicas, eight processes apart: each in a domain of its own, whose network eight such rings share
    assert times.replicas_step == pytest.approx(volumes(setup).replicas_step / 2 * 8 / 1e8)
    assert times.gather == pytest.approx(volumes(setup).gather * 3 / 4 / 1e9)


def test_a_step_with_many_sequences_is_bound_by_matrix_products() -> None:
    batch = Batch(sequences=100_000, prompt_tokens=10, new_tokens=20)
    found = generation_speed(LLAMA, H100, batch).step_seconds
    widths = LLAMA.q_dim + LLAMA.attention_out_dim
    work = 2 * 100_000 * (weights_of(LLAMA).active + LLAMA.layers * widths * 20)
    rate = best_product(H100, "bf16", published())
    assert found[0] == pytest.approx(work / rate)


def test_a_tiny_step_is_bound_by_launches_in_and_outside_the_blocks() -> None:
    setup = Setup(model=LLAMA)
    times = communication_seconds(setup, SLOW)
    assert times is not None
    step_seconds = step(setup, LAUNCHES, GPU, times, TABLE)
    one_launch = launch_seconds(setup, LAUNCHES, TABLE) / LAUNCHES.layers / in_block("eager", adapters=False)
    blocks = LAUNCHES.layers * in_block("eager", adapters=False)
    assert step_seconds.compute == pytest.approx((blocks + outside(setup)) * one_launch)
    assert step_seconds.optimizer == pytest.approx(of_optimizer(setup) * one_launch)
