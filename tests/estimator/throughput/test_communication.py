"""Communication: bytes by kind of parallelism, and the time that links take for them."""

from dataclasses import replace
from typing import Any

import pytest

from estimator import hardware
from estimator.errors import UserError
from estimator.hardware.fabrics import fabric_shares
from estimator.models import find
from estimator.setup import Setup
from estimator.throughput.communication import (
    Links,
    MeasuredBandwidth,
    collective_seconds,
    communication_seconds,
    links,
    volumes,
)

H100 = hardware.gpu("H100 SXM")
LLAMA = find("llama-8b")
P, H, L = LLAMA.parameters, LLAMA.hidden, LLAMA.layers
FAST = Links(intra_bytes_per_s=100.0, inter_bytes_per_s=10.0, domain=8)


def test_sharding_gathers_weights_twice_and_reduces_gradients_once_per_micro_batch() -> None:
    for sharding in ("fsdp", "zero3"):
        engine = "deepspeed" if sharding == "zero3" else "torchtune"
        volume = volumes(Setup(model=LLAMA, sharding=sharding, shard=8, engine=engine))
        assert (volume.gather, volume.reduce) == (pytest.approx(2 * 2 * P), pytest.approx(2 * P))
        assert (volume.gather_step, volume.reduce_step) == (0, 0)


@pytest.mark.parametrize(
    ("options", "per_pass", "per_step", "gathered"),
    [
        ({"sharding": "ddp", "replicate": 8}, 0, 2, 0),
        ({"sharding": "zero0", "replicate": 8, "engine": "deepspeed"}, 0, 2, 0),
        ({"sharding": "zero1", "shard": 8, "engine": "megatron"}, 0, 1, 1),
        ({"sharding": "zero1", "shard": 8, "engine": "deepspeed"}, 0, 2, 1),
        ({"sharding": "zero2", "shard": 8, "engine": "deepspeed"}, 2, 0, 1),
    ],
)
def test_zero_2_reduces_gradients_in_each_pass_and_the_others_once_per_step(
    options: dict[str, Any], per_pass: int, per_step: int, gathered: int
) -> None:
    """DeepSpeed's ZeRO-1 and ZeRO-2 all-reduce, which sends twice what a reduce-scatter does."""
    volume = volumes(Setup(model=LLAMA, **options))
    assert volume.gather == 0
    sent = (volume.reduce, volume.reduce_step, volume.gather_step)
    assert sent == (pytest.approx(per_pass * 2 * P), pytest.approx(per_step * 2 * P), gathered * 2 * P)


@pytest.mark.parametrize(
    ("sharding", "engine", "once"),
    [
        ("fsdp", "fsdp2", True),
        ("fsdp", "torchtune", True),
        ("zero1", "deepspeed", True),
        ("zero2", "deepspeed", False),
        ("zero3", "deepspeed", False),
    ],
)
def test_gradients_of_adapters_are_reduced_once_per_step_where_they_are_kept_whole(
    sharding: Any, engine: Any, once: bool
) -> None:
    setup = Setup(model=LLAMA, method="lora", sharding=sharding, shard=8, engine=engine)
    volume = volumes(setup)
    assert (volume.reduce == 0, volume.reduce_step == 0) == (once, not once)
    one, four = (communication_seconds(replace(setup, accumulation=count), FAST) for count in (1, 4))
    assert one == four, "seconds per pass and per step"
    reduced = dict(collective_seconds(replace(setup, accumulation=4), four))
    reduced_by_one = dict(collective_seconds(setup, one))
    kind = "all_reduce" if sharding in ("zero1", "zero2") else "reduce_scatter"
    assert reduced[kind] == pytest.approx(reduced_by_one[kind] * (1 if once else 4))


@pytest.mark.parametrize(
    ("engine", "precision", "size"),
    [
        ("torchtitan", "bf16-mixed", 4),
        ("fsdp2", "bf16-mixed", 4),
        ("fsdp2", "bf16", 2),
        ("torchtune", "bf16", 2),
        ("composer", "bf16-mixed", 2),
        ("transformers", "bf16-mixed", 2),
    ],
)
def test_gradients_are_reduced_in_the_type_of_the_engine(engine: Any, precision: Any, size: int) -> None:
    setup = Setup(model=LLAMA, sharding="fsdp", shard=8, engine=engine, precision=precision)
    assert volumes(setup).gather == pytest.approx(2 * 2 * P), "weights in 16 bits"
    assert volumes(setup).reduce == pytest.approx(size * P)
    replicas = volumes(replace(setup, replicate=2)).replicas_step
    assert replicas == pytest.approx(2 * size * P / 8)


def test_hops_of_a_ring_over_nodes_count_for_each_gather_and_each_reduction() -> None:
    full = communication_seconds(Setup(model=LLAMA, sharding="fsdp", shard=16), FAST)
    adapters = communication_seconds(Setup(model=LLAMA, method="lora", sharding="fsdp", shard=16), FAST)
    assert (full.hops, full.hops_step) == (3 * L, 0)
    assert (adapters.hops, adapters.hops_step) == (2 * L, L)


def test_hybrid_sharding_gathers_inside_a_group_and_reduces_shards_between_replicas() -> None:
    volume = volumes(Setup(model=LLAMA, sharding="fsdp", shard=8, replicate=2))
    assert (volume.gather + volume.reduce, volume.replicas_step) == (
        pytest.approx(6 * P),
        pytest.approx(4 * P / 8),
    )


def test_keeping_weights_gathered_saves_one_all_gather() -> None:
    fsdp = volumes(Setup(model=LLAMA, sharding="fsdp", shard=8))
    kept = volumes(Setup(model=LLAMA, sharding="shard_grad_op", shard=8))
    assert (kept.gather, kept.reduce) == (pytest.approx(fsdp.gather / 2), fsdp.reduce)


def test_adapters_reduce_almost_nothing_and_4_bit_weights_gather_a_quarter() -> None:
    lora = volumes(Setup(model=LLAMA, method="lora", sharding="fsdp", shard=8)).gather
    qlora = volumes(Setup(model=LLAMA, method="lora", quantization="nf4", sharding="fsdp", shard=8)).gather
    assert lora == pytest.approx(4 * P, rel=0.02)
    assert 0.3 < qlora / lora < 0.45  # embeddings and head stay in 16 bits


def test_tensor_parallelism_exchanges_four_activations_per_layer_and_direction() -> None:
    setup = Setup(model=LLAMA, tensor=4, seq_len=1024)
    layer_outputs = 1024 * H * 2 * L
    assert volumes(setup).tensor == 8 * layer_outputs
    assert volumes(replace(setup, checkpointing="full")).tensor == 10 * layer_outputs


def test_context_parallelism_sends_keys_and_values_around_the_ring() -> None:
    setup = Setup(model=LLAMA, context=4, sharding="fsdp", shard=4, seq_len=8192)
    keys = 2048 * (LLAMA.kv_dim + LLAMA.v_dim) * 2
    assert volumes(setup).context == 3 * keys * 3 * L


def test_expert_parallelism_exchanges_each_token_copy_twice_per_direction() -> None:
    model = find("mixtral-8x7b")
    setup = Setup(model=model, expert=8, sharding="zero1", shard=8, engine="megatron", seq_len=1024)
    assert volumes(setup).expert == 4 * 1024 * model.hidden * 2 * 2 * model.layers


def test_a_single_process_has_no_communication() -> None:
    setup = Setup(model=LLAMA)
    times = communication_seconds(setup, Links(intra_bytes_per_s=None, inter_bytes_per_s=None, domain=1))
    assert times.tensor == times.expert == times.overlapped == times.reduced_per_step == 0


def test_a_ring_within_a_node_uses_the_fast_link() -> None:
    assert (FAST.ring(800, 8), FAST.ring(800, 1)) == (pytest.approx(800 * 7 / 8 / 100), 0)


def test_a_ring_leaves_each_node_once_and_rings_share_the_nodes_network() -> None:
    assert FAST.ring(800, 16) == pytest.approx(800 * 15 / 16 / 10)
    # Eight rings of one member in each node: each carries its own data out of the node
    assert FAST.ring(100, 2, stride=8) == pytest.approx(100 / 2 * 8 / 10)


def test_a_required_link_of_unknown_rate_makes_the_time_unknown() -> None:
    assert Links(intra_bytes_per_s=None, inter_bytes_per_s=10.0, domain=8).ring(800, 8) is None
    assert Links(intra_bytes_per_s=100.0, inter_bytes_per_s=None, domain=8).ring(800, 16) is None
    assert Links(intra_bytes_per_s=100.0, inter_bytes_per_s=None, domain=8).ring(800, 8) is not None


def test_link_rates_are_the_datasheet_times_the_reachable_share() -> None:
    share = {kind: shares.typical for kind, shares in fabric_shares().items()}
    communication = links(Setup(model=LLAMA), H100, network_gbps=3200, rdma=True)
    assert (communication.intra_bytes_per_s, communication.inter_bytes_per_s) == (
        pytest.approx(450e9 * share["nvlink"]),
        pytest.approx(400e9 * share["rdma"]),
    )
    fast_tcp = links(Setup(model=LLAMA), hardware.gpu("L4"), network_gbps=100, rdma=False)
    assert (fast_tcp.intra_bytes_per_s, fast_tcp.inter_bytes_per_s) == (
        pytest.approx(31e9 * share["pcie"]),
        pytest.approx(12.5e9 * share["tcp-fast"]),
    )
    assert share["tcp-fast"] < 0.5 < share["tcp"]
    slow_tcp = links(Setup(model=LLAMA), hardware.gpu("L4"), network_gbps=25, rdma=False)
    assert slow_tcp.inter_bytes_per_s == pytest.approx(25e9 / 8)


def test_an_nvl72_rack_is_one_domain_whatever_its_nodes() -> None:
    communication = links(
        Setup(model=LLAMA, processes_per_node=4),
        hardware.gpu("GB200 (per GPU)"),
        network_gbps=1600,
        rdma=True,
    )
    assert (communication.domain, communication.inter_bytes_per_s) == (
        72,
        pytest.approx(200e9 * fabric_shares()["rdma"].typical * 18),
    )


def test_measured_bandwidths_replace_the_datasheet_per_link() -> None:
    measured = MeasuredBandwidth(intra_node_gbytes_per_s=200, source="checklist", date="2026-11-20")
    communication = links(Setup(model=LLAMA), H100, network_gbps=3200, rdma=True, busbw=measured)
    assert communication.intra_bytes_per_s == 200e9
    assert communication.inter_bytes_per_s == pytest.approx(400e9 * fabric_shares()["rdma"].typical)
    assert "checklist" in communication.basis


@pytest.mark.parametrize("value", [0.0, -1.0])
def test_a_measured_bandwidth_must_be_above_0(value: float) -> None:
    with pytest.raises(UserError, match="inter_node_gbytes_per_s"):
        MeasuredBandwidth(inter_node_gbytes_per_s=value, source="", date="")


@pytest.mark.parametrize(
    ("options", "kinds"),
    [
        ({"sharding": "fsdp", "shard": 8}, ["all_gather", "reduce_scatter"]),
        ({"sharding": "fsdp", "shard": 8, "replicate": 2}, ["all_gather", "reduce_scatter", "all_reduce"]),
        ({"sharding": "zero2", "shard": 8, "engine": "deepspeed"}, ["all_gather", "all_reduce"]),
        ({"sharding": "ddp", "replicate": 8}, ["all_reduce"]),
        (
            {"sharding": "fsdp", "shard": 2, "tensor": 2, "context": 2, "pipeline": 2},
            ["all_gather", "reduce_scatter", "send and receive"],
        ),
        ({"sharding": "none"}, []),
    ],
)
def test_collectives_by_kind_sum_to_the_communication_of_a_step(
    options: dict[str, Any], kinds: list[str]
) -> None:
    setup = Setup(model=LLAMA, accumulation=4, **options)
    times = communication_seconds(setup, FAST)
    found = collective_seconds(setup, times)
    assert [kind for kind, _ in found] == kinds
    whole = (times.tensor + times.expert + times.overlapped) * 4 + times.reduced_per_step + times.gather_step
    assert sum(seconds for _, seconds in found) == pytest.approx(whole)
    assert all(seconds > 0 for _, seconds in found)
