"""Speed: model FLOPs, shares of the peak from published runs, and links that are slower than GPUs."""

from dataclasses import replace

import pytest

from estimator import hardware, throughput
from estimator.engines import setup_of
from estimator.job import Job
from estimator.models import find
from tests.estimator.test_memory import layout_of


def test_full_training_takes_6_flops_a_weight_and_12_for_attention() -> None:
    model = find("llama-2-7b")
    job = Job(model=model, seq_len=2048)
    expected = 6 * (model.parameters - 32000 * 4096) + 12 * 32 * 4096 * 2048
    assert throughput.flops_per_token(setup_of(job, layout_of(seq_len=2048))) == expected


def test_frozen_weights_take_4_flops() -> None:
    model = find("llama-2-7b")
    full, lora = (
        throughput.flops_per_token(setup_of(Job(model=model, method=method), layout_of()))
        for method in ("full", "lora")
    )
    assert 0.65 < lora / full < 0.72


def test_experts_that_a_token_skips_cost_nothing() -> None:
    mixtral = find("mixtral-8x7b")
    flops = throughput.flops_per_token(setup_of(Job(model=mixtral, seq_len=1), layout_of(seq_len=1)))
    assert flops < 6.1 * mixtral.active_parameters < 2 * mixtral.parameters


def test_the_published_speed_that_a_share_comes_from_is_given_back() -> None:
    """torchtune README @1814feb17: Llama 3.2 3B on one A100, compiled and packed, 9,174 tokens/s."""
    job = Job(model=find("llama-3.2-3b"), seq_len=4096, compile=True, packing=True)
    found = throughput.speed(
        setup_of(job, layout_of(micro_batch=2, seq_len=4096)), hardware.gpu("A100 SXM 80GB")
    )
    assert found.tokens_per_second == pytest.approx(9174, rel=0.15)


@pytest.mark.parametrize("gpu", ["A10G", "T4", "RTX PRO 4500"])
def test_a_gpu_without_a_published_rate_gets_no_guess(gpu: str) -> None:
    assert (
        throughput.speed(
            setup_of(Job(model=find("llama-8b")), layout_of()), hardware.gpu(gpu)
        ).tokens_per_second
        is None
    )


def test_a_cpu_gets_no_guess() -> None:
    layout = layout_of(device="cpu", precision="fp32")
    assert throughput.speed(setup_of(Job(model=find("tiny-llama")), layout), None).tokens_per_second is None


def test_a_slow_network_slows_the_job_and_an_unknown_one_makes_the_speed_unknown() -> None:
    job, gpu = Job(model=find("llama-8b")), hardware.gpu("H100 SXM")
    layout = layout_of(nodes=2, processes_per_node=8, sharding="fsdp", seq_len=2048)
    fast = throughput.speed(setup_of(job, layout), gpu, network_gbps=3200, rdma=True).tokens_per_second
    slow = throughput.speed(setup_of(job, layout), gpu, network_gbps=10).tokens_per_second
    assert fast is not None
    assert slow is not None
    assert slow < fast / 10
    assert throughput.speed(setup_of(job, layout), gpu).tokens_per_second is None


def test_checkpointing_costs_time_but_no_model_flops() -> None:
    job, gpu = Job(model=find("llama-3.2-3b")), hardware.gpu("A100 SXM 80GB")
    without = throughput.speed(setup_of(job, layout_of()), gpu).tokens_per_second
    checkpointed = throughput.speed(setup_of(job, replace(layout_of(), activation_checkpointing=True)), gpu)
    assert without is not None
    assert checkpointed.tokens_per_second is not None
    assert checkpointed.tokens_per_second < without
