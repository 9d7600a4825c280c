"""Speed: what is unknown, what each choice costs, and how speed must move."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.published.rows import TABLE
from benchmarks.published.scoring import compare
from estimator import hardware, throughput
from estimator.errors import UserError
from estimator.models import find
from estimator.setup import Setup
from estimator.throughput import MeasuredBandwidth, Speed
from estimator.throughput.efficiency import products_rate, published

H100, A100 = hardware.gpu("H100 SXM"), hardware.gpu("A100 SXM 80GB")
LLAMA, MIXTRAL = find("llama-8b"), find("mixtral-8x7b")


def step_of(setup: Setup, **links: Any) -> float:
    seconds = throughput.speed(setup, H100, **({"network_gbps": 3200, "rdma": True} | links)).step_seconds
    assert seconds is not None
    return seconds


def rate_of(setup: Setup, **links: Any) -> float:
    rate = throughput.speed(setup, H100, **({"network_gbps": 3200, "rdma": True} | links)).tokens_per_second
    assert rate is not None
    return rate


# ---------------------------------------------------------------------------------------------------------
# What is unknown, and what a speed says of itself


@pytest.mark.parametrize(
    ("changes", "gpu", "named"),
    [
        ({}, "T4", "T4"),
        ({}, "MI250", "MI250"),
        ({"fp8": "tensorwise"}, "A100 SXM 80GB", "tensorwise"),
        ({"fp8": "nvfp4"}, "H100 SXM", "nvfp4"),
        ({"device": "cpu", "precision": "fp32"}, None, ""),
    ],
)
def test_a_device_or_recipe_without_a_sourced_rate_has_no_speed(
    changes: dict[str, Any], gpu: str | None, named: str
) -> None:
    prediction = throughput.speed(Setup(model=LLAMA, **changes), None if gpu is None else hardware.gpu(gpu))
    assert prediction.tokens_per_second is None
    assert named in prediction.basis


def test_cost_has_hours_and_usd_and_is_unknown_without_speed_or_price() -> None:
    assert throughput.cost(7.2e6, Speed(1000.0, ""), 4.0) == (2.0, 8.0)
    assert throughput.cost(1e6, Speed(None, ""), 4.0) == (None, None)
    assert throughput.cost(3.6e6, Speed(1000.0, ""), None) == (1.0, None)
    for tokens, price in ((-1.0, 1.0), (1.0, -1.0)):
        with pytest.raises(UserError):
            throughput.cost(tokens, Speed(1000.0, ""), price)


def test_an_architecture_without_runs_uses_its_best_product_and_a_separate_range() -> None:
    t4 = hardware.gpu("T4")
    prediction = throughput.speed(Setup(model=find("llama-3.2-1b"), precision="fp32", method="lora"), t4)
    assert prediction.tokens_per_second_range is not None
    assert "as no run on Turing is published" in prediction.basis
    low, high = (end / prediction.tokens_per_second for end in prediction.tokens_per_second_range)
    assert low == pytest.approx(published().of("range", "unseen p2.5"))
    assert high == pytest.approx(published().of("range", "unseen p97.5"))


def test_no_speed_range_exceeds_the_peak_of_the_gpu() -> None:
    model = find("llama-8b")
    for name, processes, micro_batch_size in (
        ("A100 SXM 80GB", 8, 8),
        ("RTX 4090", 1, 4),
        ("H100 SXM", 1, 32),
    ):
        setup = Setup(model=model, sharding="fsdp", shard=processes, micro_batch_size=micro_batch_size)
        prediction = throughput.speed(setup, hardware.gpu(name))
        assert prediction.tokens_per_second_range is not None
        assert prediction.mfu is not None
        # MFU counts causal attention twice, a few percent of all FLOPs here
        assert prediction.mfu * prediction.tokens_per_second_range[1] / prediction.tokens_per_second < 1.05, (
            name
        )


def test_gpus_of_one_architecture_differ_like_their_measured_products() -> None:
    rates = {}
    for name in ("L40S", "L40", "A10", "A10G"):
        rate = products_rate(hardware.gpu(name), "bf16", published())
        assert rate is not None
        rates[name] = rate
    assert rates["L40S"] / rates["L40"] == pytest.approx(269.15 / 170.3)
    assert rates["L40S"] / 362e12 < 0.7  # its power limit; an RTX 4090's 16-bit rate is limited by its chip
    assert rates["A10"] < rates["A10G"]  # though an A10's peak is 1.8 times an A10G's


def test_a_gpu_without_a_sourced_peak_has_a_speed_by_its_measured_product_but_no_mfu() -> None:
    prediction = throughput.speed(Setup(model=LLAMA, method="lora"), hardware.gpu("RTX A5000"))
    assert prediction.tokens_per_second is not None
    assert prediction.mfu is None
    assert "TFLOPS" in prediction.basis


@pytest.mark.parametrize(
    ("gpu", "model", "micro_batch_size", "sharding", "quantization", "measured"),
    [
        ("RTX 3090", "llama-2-7b", 4, "ddp", "none", 1190),
        ("RTX 4090", "llama-2-7b", 8, "ddp", "nf4", 2330),
        ("A100 SXM 40GB", "llama-2-70b", 1, "fsdp", "nf4", 320),
    ],
)
def test_lora_and_qlora_of_an_unfitted_source_are_predicted_on_unfitted_gpus(
    gpu: str, model: str, micro_batch_size: int, sharding: str, quantization: str, measured: float
) -> None:
    """AnswerDotAI/fsdp_qlora @05ed9f2a6: tokens/s of one GPU of two, 2,048 tokens, bitsandbytes' NF4."""
    spread = {"replicate": 2} if sharding == "ddp" else {"shard": 2}
    setup = Setup(
        model=find(model),
        engine="transformers",
        engine_version="loop",
        flat_parameters=True,
        method="lora",
        quantization=quantization,  # type: ignore[arg-type]
        sharding=sharding,  # type: ignore[arg-type]
        micro_batch_size=micro_batch_size,
        seq_len=2048,
        checkpointing="full",
        processes_per_node=2,
        **spread,
    )
    rate = throughput.speed(setup, hardware.gpu(gpu)).tokens_per_second
    assert rate / 2 == pytest.approx(measured, rel=0.2)


def test_the_basis_names_published_runs_and_says_when_it_is_interpolated() -> None:
    known = throughput.speed(Setup(model=LLAMA, compile=True), A100).basis
    assert "torchtune" in known
    assert "interpolated" not in known
    assert "itself" not in known
    b200 = hardware.gpu("B200 SXM")
    assert "interpolated" in throughput.speed(Setup(model=LLAMA, compile=True, method="lora"), b200).basis
    assert "experts" in throughput.speed(Setup(model=MIXTRAL), H100).basis
    assert (
        "no published run on the L40S itself"
        in throughput.speed(Setup(model=LLAMA), hardware.gpu("L40S")).basis
    )


def test_a_speed_is_the_sum_of_its_parts_within_its_range() -> None:
    setup = Setup(
        model=LLAMA, engine="megatron", tensor=2, pipeline=2, sharding="zero1", shard=2, accumulation=4
    )
    prediction = throughput.speed(setup, H100)
    assert prediction.tokens_per_second_range is not None
    assert prediction.step_seconds == prediction.parts.total
    assert (
        min(
            prediction.parts.compute,
            prediction.parts.communication,
            prediction.parts.bubble,
            prediction.parts.optimizer,
        )
        > 0
    )
    low, high = prediction.tokens_per_second_range
    assert low < prediction.tokens_per_second < high
    tokens = setup.micro_batch_size * setup.seq_len * setup.data_parallel * setup.accumulation
    assert prediction.tokens_per_second == pytest.approx(tokens / prediction.parts.total)


def test_mfu_counts_model_flops_against_the_bf16_peak() -> None:
    """torchtune README @1814feb17: Llama 3.2 3B on one A100, compiled and packed: 9,174 tokens/s, 68 %."""
    setup = Setup(model=find("llama-3.2-3b"), micro_batch_size=2, seq_len=4096, compile=True, loss="chunked")
    prediction = throughput.speed(setup, A100)
    assert prediction.tokens_per_second == pytest.approx(9174, rel=0.1)
    assert prediction.mfu == pytest.approx(0.68, rel=0.1)


# ---------------------------------------------------------------------------------------------------------
# Cost


# ---------------------------------------------------------------------------------------------------------
# What choices cost


def test_a_slow_network_slows_the_job_and_an_unknown_one_makes_the_speed_unknown() -> None:
    setup = Setup(model=LLAMA, sharding="fsdp", shard=16)
    assert rate_of(setup, network_gbps=10, rdma=False) < rate_of(setup) / 10
    unknown = throughput.speed(setup, H100)
    assert unknown.tokens_per_second is None
    assert "network" in unknown.basis
    gpu = replace(H100, interconnect_gbps=None)
    assert "GPUs of a node" in throughput.speed(Setup(model=LLAMA, sharding="fsdp", shard=8), gpu).basis


def test_compilation_speeds_up_training_by_about_the_published_factor() -> None:
    """torchtune README @1814feb17: 7,075 to 8,998 tokens/s; torchtitan @9dec370: 5,762 to 6,667."""
    eager = Setup(model=LLAMA, micro_batch_size=2, seq_len=8192)
    assert 1.1 < rate_of(replace(eager, compile=True)) / rate_of(eager) < 1.35


def test_float8_gains_less_than_the_ratio_of_peaks() -> None:
    bf16 = Setup(model=LLAMA, compile=True, micro_batch_size=2, seq_len=8192)
    assert 1.15 < rate_of(replace(bf16, fp8="tensorwise")) / rate_of(bf16) < 1.5


def test_lora_is_faster_than_full_training_and_qlora_slower_than_lora() -> None:
    full = Setup(model=LLAMA, compile=True, micro_batch_size=4)
    lora = replace(full, method="lora")
    qlora = replace(lora, quantization="nf4")
    assert rate_of(full) < rate_of(qlora) < rate_of(lora) < 1.5 * rate_of(full)


def test_measured_runs_of_this_package_are_predicted_within_15_percent() -> None:
    found = [item for item in compare(TABLE).throughput if item.row.source.startswith("benchmarks.on_gpu")]
    assert len(found) == 7
    assert {item.row.id: item.error for item in found if abs(item.error) > 0.15} == {}


def test_more_micro_batches_and_virtual_stages_shrink_the_bubble() -> None:
    """(pp - 1) / (m x vpp + pp - 1) of the step: Narayanan et al. 2021 (arXiv:2104.04473), section 2.2."""
    setup = Setup(model=LLAMA, engine="megatron", pipeline=4, schedule="1f1b", accumulation=4, seq_len=4096)
    for micro_batches, virtual in ((4, 1), (16, 1), (16, 4)):
        chosen = replace(
            setup,
            accumulation=micro_batches,
            virtual_stages=virtual,
            schedule="interleaved" if virtual > 1 else "1f1b",
        )
        parts = throughput.speed(chosen, H100).parts
        share = parts.bubble / (parts.total - parts.optimizer)
        assert share == pytest.approx(3 / (micro_batches * virtual + 3), rel=0.05)


def test_small_batches_are_bound_by_kernel_launches() -> None:
    """Qwen README: Qwen-1.8B on one A100 trains as many steps a second on 512 tokens as on 256."""
    short, long = (
        throughput.speed(
            Setup(model=find("qwen-1.8b"), engine="transformers", method="lora", seq_len=length), A100
        )
        for length in (256, 512)
    )
    assert long.step_seconds / short.step_seconds < 1.1


# ---------------------------------------------------------------------------------------------------------
# Properties

SETUPS = st.builds(
    Setup,
    model=st.sampled_from((LLAMA, MIXTRAL, find("qwen3-30b-a3b"), find("deepseek-v2-lite"))),
    method=st.sampled_from(("full", "lora")),
    lora_targets=st.just(("q_proj", "o_proj")),
    engine=st.sampled_from(("torchtune", "deepspeed", "torchtitan", "megatron")),
    sharding=st.sampled_from(("fsdp", "zero1", "zero3")),
    shard=st.sampled_from((1, 2, 8, 16)),
    tensor=st.sampled_from((1, 2, 4)),
    pipeline=st.sampled_from((1, 2)),
    micro_batch_size=st.integers(1, 16),
    accumulation=st.integers(1, 8),
    seq_len=st.sampled_from((512, 4096, 16384)),
    checkpointing=st.sampled_from(("none", "selective", "full")),
    compile=st.booleans(),
)


@given(setup=SETUPS, more=st.integers(1, 8))
@settings(max_examples=150, deadline=None)
def test_more_tokens_never_reduce_the_step_time(setup: Setup, more: int) -> None:
    before = step_of(setup)
    assert step_of(replace(setup, micro_batch_size=setup.micro_batch_size + more)) >= before
    assert step_of(replace(setup, accumulation=setup.accumulation + more)) >= before
    assert step_of(replace(setup, seq_len=setup.seq_len * 2)) >= before


@given(setup=SETUPS)
@settings(max_examples=150, deadline=None)
def test_more_checkpointing_is_never_faster(setup: Setup) -> None:
    rates = [rate_of(replace(setup, checkpointing=kind)) for kind in ("none", "selective", "full")]
    assert rates == sorted(rates, reverse=True)


@given(setup=SETUPS, gbps=st.floats(1, 3200), less=st.floats(0.1, 1.0), rdma=st.booleans())
@settings(max_examples=150, deadline=None)
def test_a_slower_link_is_never_faster(setup: Setup, gbps: float, less: float, rdma: bool) -> None:
    assert rate_of(setup, network_gbps=gbps * less, rdma=rdma) <= rate_of(setup, network_gbps=gbps, rdma=rdma)
    slow, fast = (
        MeasuredBandwidth(
            intra_node_gbytes_per_s=factor * 300, inter_node_gbytes_per_s=factor * 40, source="", date=""
        )
        for factor in (less, 1.0)
    )
    assert rate_of(setup, busbw=slow) <= rate_of(setup, busbw=fast)


@given(setup=SETUPS)
@settings(max_examples=100, deadline=None)
def test_the_parts_of_a_step_are_never_negative_and_mfu_stays_below_1(setup: Setup) -> None:
    prediction = throughput.speed(setup, H100, network_gbps=3200, rdma=True)
    assert prediction.parts is not None
    parts = prediction.parts
    assert min(parts.compute, parts.communication, parts.bubble, parts.optimizer) >= -1e-12
    assert min(seconds for _, seconds in parts.of_compute) >= 0
    assert sum(seconds for _, seconds in parts.of_compute) <= parts.compute * (1 + 1e-9)
    assert 0 < prediction.mfu < 1
