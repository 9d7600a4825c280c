"""Exact bytes of clamps and branches of the memory formulas, and each limit at its edge."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from estimator.memory import active, buffers, diffusion, evaluation, generation, latents, moments
from estimator.memory.activations.block import block_bytes
from estimator.memory.buffers import Buffers, dequantized_bytes, optimizer_temporary_bytes
from estimator.memory.host import (
    CPU_RUNTIME_BYTES,
    CUDA_CONTEXT_BYTES,
    GLOO_BYTES,
    GPU_PROCESS_HOST_BYTES,
    NCCL_ALONE_BYTES,
    NCCL_BYTES,
    checkpoint_bytes,
    disk_bytes,
    host_bytes,
    runtime_bytes,
    shared_memory_bytes,
)
from estimator.memory.logits import Logits, loss_bytes
from estimator.memory.moments import Moment, Peak, StageMoments, in_flight, peak, stale_bytes
from estimator.memory.ranges import (
    CONTEXT_NEEDED_BYTES,
    NCCL_NEEDED_BYTES,
    needed_runtime_bytes,
    needs,
    shows,
)
from estimator.memory.residuals import VARYING, class_of
from estimator.memory.shape import part_of
from estimator.models import find
from estimator.plan import GIB
from estimator.setup import Answers, Setup
from estimator.vocabulary import IMAGE_TASK
from tests.estimator.memory.llama_step import LLAMA, step

V, H, L, F = LLAMA.vocab, LLAMA.hidden, LLAMA.layers, LLAMA.ffn
LARGEST = F * H  # of the matrices of a block
MIXTRAL = find("mixtral-8x7b")


def loss(tokens: int = 1000, **changes: Any) -> Logits:
    setup = step(**changes)
    return loss_bytes(setup, part_of(setup, "only" if setup.pipeline == 1 else "last"), tokens)


def communication(**changes: Any) -> Buffers:
    setup = step(**changes)
    return buffers.buffers(setup, part_of(setup, "only"))


def temporary(**changes: Any) -> int:
    setup = step(**changes)
    return optimizer_temporary_bytes(setup, part_of(setup, "only"))


@pytest.mark.parametrize(
    ("schedule", "pipeline", "micro_batches", "chunks", "first", "last"),
    [
        ("none", 1, 8, 1, 1, 1),
        ("split", 4, 8, 1, 1, 1),
        ("afab", 4, 8, 1, 8, 8),
        ("1f1b", 4, 8, 1, 4, 1),
        ("1f1b", 4, 3, 1, 3, 1),
        ("zero-bubble", 4, 8, 1, 4, 4),
        ("zero-bubble", 4, 2, 1, 2, 2),
        ("interleaved", 4, 8, 2, 5.5, 2.5),
        ("interleaved", 4, 5, 2, 5, 2.5),
        ("interleaved", 4, 8, 1, 4, 1),
    ],
)
def test_each_pipeline_schedule_keeps_its_number_of_micro_batches_in_flight(
    schedule: Any, pipeline: int, micro_batches: int, chunks: int, first: float, last: float
) -> None:
    setup = step(schedule=schedule, pipeline=pipeline, accumulation=micro_batches, virtual_stages=chunks)
    ends = ("only", "only") if pipeline == 1 else ("first", "last")
    assert [in_flight(setup, part_of(setup, end)) for end in ends] == [first, last]


def test_stream_reservations_are_not_negative_and_weighting_excludes_gradients() -> None:
    moment = Moment({"activations": 60, "gradients": 40}, other_streams=40)
    assert [moment.reserved_extra(streams) for streams in (99, 100, 130)] == [0, 0, 30]
    assert moment.weighted(2.0, 0) == (160.0, 100)
    assert moment.weighted(2.0, 130) == (190.0, 100)
    assert moment.weighted(2.0, 90) == (160.0, 100)


def test_a_peak_is_the_constant_part_plus_the_largest_moment() -> None:
    small, large = Moment({"activations": 50}), Moment({"weights": 7, "activations": 60})
    stage = StageMoments(
        constant={"weights": 100, "adapters": 0}, moments=[small, large], streams=90, unfitting=5
    )
    assert stage.peak(1.0, True) == Peak({"weights": 107, "activations": 60}, reserved_extra=90 - 67 + 5)
    largest = stage.peak(1.0, False)
    assert (largest.active, largest.states_bytes, largest.dynamic_bytes) == (167, 107, 60)


@pytest.mark.parametrize(
    ("changes", "held"),
    [
        ({}, False),
        ({"accumulation": 2}, True),
        ({"engine": "deepspeed", "sharding": "zero2", "shard": 8}, True),
        ({"engine": "litgpt"}, True),
        ({"accumulation": 2, "longest_once": True, "longest_first": True}, False),
        ({"accumulation": 2, "longest_once": True}, True),
    ],
)
def test_gradients_before_the_backward_pass_come_from_earlier_micro_batches(
    changes: dict[str, Any], held: bool
) -> None:
    """The loss of a vocabulary so large is the peak, with those gradients or without."""
    setup = step(model=find("gemma-2-2b"), seq_len=4096, micro_batch_size=8, **changes)
    assert ("gradients" in peak(setup).categories) == held


@pytest.mark.parametrize(("every", "kept"), [(1, 0), (2, L // 2), (3, L - L // 3), (L + 1, L)])
def test_recompute_every_n_checkpoints_one_of_n_blocks(every: int, kept: int) -> None:
    full = step(checkpointing="full", recompute_every=every, method="lora", seq_len=8192)
    none = replace(full, checkpointing="none")
    found, whole = (peak(setup).categories["activations"] for setup in (full, none))
    offloaded = peak(replace(full, activation_offload=True)).categories["activations"]
    recomputed = L - kept
    boundary = 8192 * 2 * H
    assert found - offloaded == pytest.approx(max(recomputed - 2, 0) * boundary, abs=2)
    assert found <= whole + recomputed * boundary


def test_activation_offload_without_checkpointing_leaves_half_of_the_activations() -> None:
    setup = step(method="lora", seq_len=8192, micro_batch_size=4)
    kept, left = (
        peak(replace(setup, activation_offload=flag)).categories["activations"] for flag in (False, True)
    )
    per_block = kept / L
    assert kept / 2 < left < kept / 2 + 2 * per_block


@pytest.mark.parametrize(
    ("changes", "factor"),
    [
        ({}, 0.0),
        ({"quantization": "nf4"}, 1.75),
        ({"quantization": "nf4", "longest_once": True}, 1.0),
        ({"quantization": "nf4", "engine": "torchtune"}, 0.0),
    ],
)
def test_only_litgpt_with_a_quantized_base_has_stale_inputs(changes: dict[str, Any], factor: float) -> None:
    setup = step(**({"engine": "litgpt", "method": "lora"} | changes))
    inputs = (2 * H + LLAMA.attention_out_dim + F) * 2
    assert stale_bytes(setup, part_of(setup, "only")) == int(setup.tokens * L * inputs * factor)


def test_torch_pipelines_keep_the_outputs_of_the_last_stage() -> None:
    changes: dict[str, Any] = {"pipeline": 4, "accumulation": 32, "schedule": "1f1b"}
    found = peak(step(engine="torchtitan", **changes)).categories["logits and loss"]
    assert found == loss(2048, engine="torchtitan", **changes).peak + 32 * 2048 * V * 2
    assert "logits and loss" not in peak(step(engine="megatron", **changes)).categories


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"task": "reward", "engine": "transformers"}, Logits(0)),
        ({"engine": "deepspeed"}, Logits(12_000 * V, unfitting=2000 * V)),
        ({"engine": "composer"}, Logits(14_000 * V, held=2000 * V)),
        ({"engine": "torchtitan", "tensor": 2}, Logits(16_000 * V // 2)),
        ({"engine": "torchtune", "tensor": 2}, Logits(12_000 * V, unfitting=2000 * V)),
        ({"engine": "litgpt"}, Logits(14_000 * V)),
        ({"engine": "litgpt", "method": "lora"}, Logits(10_000 * V)),
        ({"engine": "litgpt", "method": "adapter-v2"}, Logits(12_000 * V)),
        ({"engine": "transformers", "loss": "kernel"}, Logits(8_000 * V)),
        ({"loss": "chunked"}, Logits(6000 * V + 4000 * V // 8, 2000 * V * 6 // 8, 3 * 2 * V * H)),
        ({"loss": "chunked", "loss_chunks": 1}, Logits(10_000 * V, 0, 6 * V * H)),
        ({"loss": "chunked", "method": "lora"}, Logits(6000 * V + 500 * V, 2000 * V * 6 // 8, 0)),
        ({"loss": "chunked", "compile": True}, Logits(2250 * V, 2000 * V * 6 // 8, 6 * V * H)),
        ({"loss": "chunked", "compile": True, "engine": "torchtitan"}, Logits(4000 * V)),
        ({"loss": "recomputed"}, Logits(4000 * V + 10_000 * V)),
        ({"loss": "recomputed", "method": "adapter-v2"}, Logits(6000 * V + 10_000 * V)),
        ({"loss": "fused"}, Logits(10 * (1000 * H // V) * V + 4 * V * H)),
        (
            {"loss": "fused", "engine": "fsdp2", "engine_version": "liger"},
            Logits(2 * (32 * V + 1000 * H + V * H)),
        ),
    ],
)
def test_each_loss_kind_takes_the_listed_bytes_for_a_thousand_tokens(
    changes: dict[str, Any], found: Logits
) -> None:
    assert loss(**changes) == found


def test_logits_dominate_a_recomputed_loss_of_many_tokens() -> None:
    assert loss(8192, loss="recomputed").peak == 3 * 2 * 8192 * V
    assert loss(8192, loss="recomputed", method="adapter-v2").peak == 5 * 2 * 8192 * V


def test_ddp_has_one_gradient_bucket_of_model_size_except_in_megatron() -> None:
    bucket = 2 * LLAMA.parameters
    assert communication(sharding="ddp", replicate=2) == Buffers(0, 0, bucket, 0, bucket, 0)
    assert communication(sharding="ddp", replicate=2, engine="megatron") == buffers.NONE
    assert communication() == buffers.NONE


@pytest.mark.parametrize(
    ("stage", "shard", "device", "buckets", "live"),
    [
        (0, 1, "cuda", 0, 0),
        (1, 8, "cuda", 3, 0),
        (2, 8, "cpu", 2, 0),
        (3, 8, "cuda", 2, 1),
        (3, 8, "cpu", 1, 1),
    ],
)
def test_deepspeed_buckets_are_limited_by_their_configured_size(
    stage: int, shard: int, device: Any, buckets: int, live: int
) -> None:
    found = communication(engine="deepspeed", sharding=f"zero{stage}", shard=shard, device=device)
    assert found.at_loss == buckets * 2 * 200_000_000 + live * 2 * 1_050_000_000
    small = communication(
        engine="deepspeed", sharding=f"zero{stage}", shard=shard, device=device, model=find("tiny-llama")
    )
    assert small.at_loss == (buckets + live) * 2 * find("tiny-llama").parameters


def test_temporary_memory_of_each_optimizer_step_follows_its_formula() -> None:
    parameters = LLAMA.parameters
    assert (temporary(), temporary(fused_optimizer=False)) == (0, 2 * parameters)
    assert temporary(fused_optimizer=False, optimizer_in_backward=True) == 0
    assert temporary(fused_optimizer=False, optimizer="adamw8bit") == 0
    assert (temporary(optimizer="muon"), temporary(device="cpu")) == (8 * LARGEST, 2 * 2 * V * H)
    assert temporary(device="cpu", method="lora", lora_rank=16) == 2 * 2 * 16 * F
    assert temporary(engine="deepspeed", sharding="zero2", shard=8) == 4 * -(-parameters // 8)
    assert temporary(engine="deepspeed", sharding="zero3", shard=2) == 4 * 10**9
    assert temporary(engine="deepspeed", sharding="zero2", shard=8, offload="optimizer") == 0


@pytest.mark.parametrize(
    ("changes", "elements"),
    [
        ({}, 0),
        ({"quantization": "int8", "engine": "transformers"}, 0),
        ({"quantization": "int8", "engine": "fsdp2"}, LARGEST),
        ({"quantization": "nf4", "tensor": 2}, LARGEST // 2),
        ({"quantization": "nf4", "engine": "litgpt"}, V * H),
    ],
)
def test_dequantization_takes_the_bytes_of_the_largest_quantized_matrix(
    changes: dict[str, Any], elements: int
) -> None:
    assert dequantized_bytes(step(method="lora", **changes)) == 2 * elements


def of_one_block(setup: Setup) -> tuple[int, int, int]:
    """Bytes in 16 bits of one block, of the root, and of the head."""
    part = part_of(setup, "only")
    assert part.block == LLAMA.layer_parameters
    return 2 * part.block, 2 * (part.untied_head + part.embedding), 2 * part.untied_head


def test_fsdp_gathers_the_computing_block_and_the_next_one() -> None:
    block, root, head = of_one_block(step())
    first = 2 * LARGEST
    full = {"sharding": "fsdp", "shard": 8, "engine": "torchtune"}
    gathered = root + 2 * block
    assert communication(**full) == Buffers(
        0, gathered - block, gathered + first, block, root, max(2 * block, head), head, 2 * (root + block)
    )
    kept = communication(**full | {"sharding": "shard_grad_op"})
    assert (kept.at_loss, kept.gathered) == (root + L * block,) * 2
    titan = communication(**full | {"engine": "torchtitan"})
    gathered = head + 2 * block
    assert titan == Buffers(
        gathered, gathered, gathered + block, max(2 * block, head), root - head, max(2 * block, head)
    )


def test_fsdp1_reduces_complete_blocks_unless_gradients_accumulate() -> None:
    block, root, _ = of_one_block(step(engine="litgpt"))
    changes = {"engine": "litgpt", "sharding": "fsdp", "shard": 8}
    gathered = root + 3 * block
    assert communication(**changes) == Buffers(gathered, gathered, gathered + block, 2 * block, 0, 2 * block)
    several = communication(**changes, accumulation=2)
    assert several == Buffers(gathered, gathered, gathered + block, 0, 0, 0)


def test_fsdp2_in_one_process_copies_a_block_and_sums_the_roots_gradients() -> None:
    block, root, head = of_one_block(step())
    changes = {"engine": "fsdp2", "precision": "bf16-mixed", "sharding": "fsdp"}
    last = max(root, 4 * root - root - 2 * block)
    assert communication(**changes) == Buffers(
        0, root, root + block + 2 * LARGEST, 2 * block, last, 4 * root, head, root + block
    )
    lora = step(**changes, method="lora")
    reduced = 2 * 4 * -(-lora.trainable_parameters // L)
    assert communication(**changes, method="lora") == Buffers(
        0, root, root + block, reduced, 0, reduced, forward=root + block
    )


@pytest.mark.parametrize(("quantization", "bytes_each"), [("nf4", 0.5), ("int8", 1.0)])
def test_quantized_blocks_are_gathered_without_dequantization(quantization: Any, bytes_each: float) -> None:
    changes = {"engine": "fsdp2", "sharding": "fsdp", "shard": 8, "method": "lora"}
    part = part_of(step(), "only")
    assert part.block_linear == H * (2 * LLAMA.q_dim + 2 * LLAMA.kv_dim) + 3 * H * F
    whole, packed = (communication(**changes, quantization=kind) for kind in ("none", quantization))
    saved = 2 * part.block_linear - int(part.block_linear * bytes_each)
    assert whole.backward - packed.backward == whole.forward - packed.forward == 2 * saved


def test_pipeline_stages_round_layers_up_and_the_end_stages_hold_embedding_and_head() -> None:
    setup = step(engine="torchtitan", pipeline=5, schedule="1f1b", accumulation=5, tensor=2)
    first, last = (part_of(setup, stage) for stage in ("first", "last"))
    assert (first.layers, last.layers) == (7, 7)
    assert (first.embedding, first.untied_head, first.norm) == (V * H // 2, 0, 0)
    assert (last.embedding, last.untied_head, last.norm) == (0, V * H // 2, H)
    assert (first.blocks, first.block) == (7 * first.block, (LLAMA.layer_parameters - 2 * H) // 2 + 2 * H)
    assert first.blocks_linear == 7 * first.block_linear == 7 * (LLAMA.layer_parameters - 2 * H) // 2


def test_dense_layers_precede_experts_and_the_largest_block_is_used() -> None:
    model = find("deepseek-v3")
    setup = Setup(model=model, engine="torchtitan", pipeline=2, schedule="1f1b", accumulation=2)
    first, last = (part_of(setup, stage) for stage in ("first", "last"))
    stage = -(-model.layers // 2)
    assert first.experts * stage == last.experts * (stage - model.dense_layers)
    assert first.block == last.block == model.layer_parameters
    assert (
        first.blocks
        == model.dense_layers * model.dense_layer_parameters
        + (stage - model.dense_layers) * model.layer_parameters
    )


def test_gradients_of_experts_are_sharded_over_the_processes_that_hold_them() -> None:
    setup = Setup(model=MIXTRAL, engine="torchtitan", sharding="fsdp", shard=16, expert=8)
    part = part_of(setup, "only")
    routed = MIXTRAL.layers * MIXTRAL.experts * 3 * MIXTRAL.hidden * MIXTRAL.ffn
    assert (part.experts, part.expert_ways) == (routed // 8, 2)
    whole = part_of(replace(setup, shard=4, expert=4), "only")
    assert (whole.experts, whole.expert_ways) == (routed // 4, 1)


def test_runtime_memory_is_context_plus_the_communication_library() -> None:
    alone, several = step(), step(sharding="fsdp", shard=2)
    assert runtime_bytes(alone) == CUDA_CONTEXT_BYTES
    assert runtime_bytes(several) == CUDA_CONTEXT_BYTES + NCCL_BYTES
    assert runtime_bytes(step(engine="fsdp2")) == CUDA_CONTEXT_BYTES + NCCL_ALONE_BYTES["fsdp2"]
    on_cpu = step(engine="deepspeed", device="cpu", sharding="zero1")
    assert runtime_bytes(on_cpu) == CPU_RUNTIME_BYTES
    assert runtime_bytes(replace(on_cpu, shard=2)) == CPU_RUNTIME_BYTES + GLOO_BYTES
    assert needed_runtime_bytes(alone) == CONTEXT_NEEDED_BYTES
    assert needed_runtime_bytes(several) == CONTEXT_NEEDED_BYTES + NCCL_NEEDED_BYTES
    lone = needed_runtime_bytes(step(engine="deepspeed", sharding="zero2"))
    assert lone == CONTEXT_NEEDED_BYTES + NCCL_ALONE_BYTES["deepspeed"]


def test_host_memory_of_offloading_is_shared_by_the_nodes() -> None:
    base = step(engine="deepspeed", sharding="zero3", shard=16, processes_per_node=8)
    common = 8 * GPU_PROCESS_HOST_BYTES + 4 * LLAMA.parameters
    assert host_bytes(base) == common
    states = replace(base, offload="optimizer")
    assert host_bytes(states) == common + int(1.5 * 8 * LLAMA.parameters)
    everything = replace(base, offload="all")
    assert host_bytes(everything) == host_bytes(states) + LLAMA.parameters
    nvme = replace(everything, offload_to="nvme")
    assert host_bytes(nvme) == common + int(1.5 * 2 * LLAMA.parameters)
    activations = replace(base, activation_offload=True)
    assert host_bytes(activations) == common + 8 * 2048 * 2 * H * L
    assert (shared_memory_bytes(base), shared_memory_bytes(replace(base, shard=4))) == (8 * GIB, 4 * GIB)


def test_disk_space_covers_weights_checkpoints_and_result() -> None:
    setup = step(keep_checkpoints=3)
    weights, checkpoint = 2 * LLAMA.stored_parameters, checkpoint_bytes(setup)
    assert checkpoint == 6 * LLAMA.parameters  # weights and both moments in bf16
    assert disk_bytes(setup) == 2 * weights + 4 * checkpoint + GIB
    assert disk_bytes(setup, keeps_checkpoints=False) == 2 * weights + 3 * checkpoint + GIB
    adapter = replace(setup, method="lora", adapter_only=True)
    expected = weights + 4 * adapter.trainable_parameters + 4 * checkpoint_bytes(adapter) + GIB
    assert disk_bytes(adapter) == expected


def test_a_model_that_fills_the_gpus_exactly_needs_no_further_gpu() -> None:
    needed = evaluation.inference_bytes(LLAMA, 2, 2048)
    assert evaluation.inference_gpus(LLAMA, 4, needed, 2048) == 2
    assert evaluation.inference_gpus(LLAMA, 4, needed - 1, 2048) == 3
    assert evaluation.inference_gpus(LLAMA, 4, 1, 2048) == 4
    process = GPU_PROCESS_HOST_BYTES + evaluation.LARGEST_FILE
    assert evaluation.inference_host_bytes(LLAMA, 2, needed, 2048) == process
    assert evaluation.inference_host_bytes(LLAMA, 2, needed - 10, 2048) == process + 20


def test_the_largest_batch_fills_the_memory_exactly() -> None:
    lengths: dict[str, Any] = {"prompt_tokens": 100, "new_tokens": 50}
    batch = generation.Batch(sequences=7, **lengths)
    needed = sum(generation.generation_bytes(LLAMA, batch).values())
    assert generation.largest_batch(LLAMA, needed, **lengths) == 7
    assert generation.largest_batch(LLAMA, needed - 1, **lengths) == 6
    assert generation.largest_batch(LLAMA, needed, **lengths, max_sequences=3) == 3
    assert generation.largest_batch(LLAMA, GIB, **lengths) == 0


def test_all_answers_of_a_grpo_step_form_one_batch() -> None:
    setup = step(
        task="grpo",
        engine="fsdp2",
        seq_len=1000,
        answers=Answers(length=400),
        micro_batch_size=2,
        accumulation=3,
    )
    batch = generation.grpo_batch(setup)
    assert (batch.sequences, batch.prompt_tokens, batch.new_tokens, batch.tokens) == (6, 600, 400, 1000)
    assert generation.grpo_batch(replace(setup, answers=Answers(length=1000))).prompt_tokens == 1


def test_a_sliding_window_limits_the_cache_of_its_blocks() -> None:
    model = find("gemma-2-2b")
    window = model.sliding_window
    assert window
    width = (model.kv_dim + model.v_dim) * 2
    near = generation.kv_cache_bytes(model, 3, window)
    assert near == 3 * model.layers * window * width
    more = generation.kv_cache_bytes(model, 3, window + 10) - near
    assert more == 3 * (model.layers - model.sliding_layers) * 10 * width


def test_images_are_encoded_one_to_eight_at_a_time() -> None:
    model: Any = replace(find("sdxl"), resolution=512)
    networks = latents.network_bytes(model, on_gpu=True)
    each = latents.image_bytes(model)
    assert each == 4 * 4096 * 64 * (3 + 5 * model.vae_width)
    for room, images in ((0, 1), (2.99, 2), (3.01, 3), (100, 8)):
        assert latents.images_at_once(model, networks + int(room * each / 0.8)) == images
    assert latents.images_at_once(model, None) == 8


def test_the_zero_3_cache_adds_less_with_larger_activations() -> None:
    def reserved_extra_of(seq_len: int) -> int:
        sharded = {"engine": "deepspeed", "engine_version": "liger", "loss": "fused", "checkpointing": "full"}
        return peak(step(**sharded, sharding="zero3", shard=8, seq_len=seq_len)).reserved_extra

    assert 0 < reserved_extra_of(262_144) < 0.7 * reserved_extra_of(2_048)


def test_batches_of_varying_length_show_more_memory_up_to_the_capacity() -> None:
    fixed, varying = (step(engine="torchtune", fixed_length=fixed, seq_len=8_192) for fixed in (True, False))
    assert needs(fixed)[0].likely_bytes == needs(varying)[0].likely_bytes
    free = shows(varying, "process")
    assert free.likely_bytes > shows(fixed, "process").likely_bytes
    capped = shows(varying, "process", capacity_bytes=free.likely_bytes - 1)
    assert capped.upper_bytes == capped.likely_bytes == free.likely_bytes - 1


def test_fsdp1_with_frozen_weights_keeps_a_second_checkpoint_per_block_in_the_trainer() -> None:
    def backward(**changes: Any) -> int:
        setup = step(
            engine="transformers",
            method="lora",
            sharding="fsdp",
            shard=8,
            flat_parameters=True,
            checkpointing="full",
            loss="fused",
            seq_len=32_768,
            **changes,
        )
        return moments.peak(setup, held=False).categories["activations"]

    assert backward() - backward(engine_version="loop") == pytest.approx(L * H * 2 * 32_768, rel=0.01)


def test_only_deepspeed_has_zero_buckets_and_offloaded_gradients() -> None:
    megatron = step(engine="megatron", sharding="zero1", shard=8, offload="optimizer")
    assert megatron.zero_stage is None
    assert active(megatron)["gradients"] == 4 * LLAMA.parameters
    assert active(replace(megatron, engine="deepspeed")).get("gradients", 0) < 4 * LLAMA.parameters


def test_a_frozen_reference_model_is_counted_if_the_framework_keeps_one() -> None:
    own = step(engine="deepspeed", task="dpo")
    assert "reference model" not in active(own)
    assert active(replace(own, reference_copy=True))["reference model"] == 2 * LLAMA.parameters


def test_loading_a_quantized_model_under_zero_3_can_be_the_peak() -> None:
    setup = step(engine="deepspeed", sharding="zero3", shard=64, method="lora", quantization="nf4", seq_len=1)
    peak_memory = moments.peak(setup, held=False)
    assert set(peak_memory.categories) == {"weights"}
    assert peak_memory.reserved_extra == 0
    assert moments.peak(replace(setup, quantization="none")).categories["weights"] < peak_memory.active


def test_padding_masks_repeat_keys_for_all_heads_and_dropout_saves_masks() -> None:
    packed = step(engine="deepspeed")
    padded = replace(packed, fixed_length=False)
    repeated = LLAMA.q_dim - LLAMA.kv_dim + LLAMA.attention_out_dim - LLAMA.v_dim
    assert block_bytes(padded) - block_bytes(packed) == 2 * repeated
    bert = find("bert-base")
    causal = replace(bert, causal=True)
    both = [block_bytes(step(model=model, seq_len=512, engine="transformers")) for model in (bert, causal)]
    assert both[0] - both[1] == 2 * bert.hidden


def test_text_encoder_adapters_save_activations_of_each_image() -> None:
    model: Any = replace(find("sdxl"), resolution=512)
    changes: dict[str, Any] = {"method": "lora", "engine": "fsdp2", "task": IMAGE_TASK}
    kept, unets = [], []
    for trained in (model, replace(model, trains_texts=True)):
        setup = Setup(model=trained, lora_targets=model.all_linear, micro_batch_size=3, **changes)
        at_loss = diffusion.moments(setup, trained, part_of(setup, "only"), 0, buffers.NONE)[1]
        kept.append(at_loss["activations"])
        adapters = diffusion.adapters_of(setup)
        unets.append(
            model.unet.saved_bytes(
                64, 64, 2, adapters=adapters, recomputed=False, texts_trained=trained.trains_texts
            )
        )
    texts = sum(each.saved_bytes(2, adapters, recomputed=False) for each in model.texts)
    assert kept == [3 * unets[0], 3 * (unets[1] + texts)]


@pytest.mark.parametrize(
    ("changes", "live", "held"),
    [
        ({}, "one GPU", "one GPU"),
        ({"method": "lora", "quantization": "nf4"}, "one GPU, quantized", "one GPU"),
        ({"sharding": "fsdp", "shard": 2}, "several GPUs", "several GPUs, eager"),
        (
            {"sharding": "fsdp", "shard": 2, "checkpointing": "full"},
            "several GPUs",
            "several GPUs, eager, recomputing",
        ),
        ({"sharding": "fsdp", "shard": 2, "compile": True}, "several GPUs", "several GPUs, compiled"),
        ({"pipeline": 2, "schedule": "split"}, "one GPU", "one GPU"),
        ({"pipeline": 2, "schedule": "1f1b"}, *["tensor or pipeline parallel"] * 2),
        ({"tensor": 2}, *["tensor or pipeline parallel"] * 2),
        ({"engine": "deepspeed", "sharding": "zero1"}, *["DeepSpeed"] * 2),
        ({"device": "cpu"}, "cpu", "cpu"),
        ({"fixed_length": False}, "one GPU", VARYING),
        ({"fixed_length": False, "longest_first": True}, "one GPU", "one GPU"),
        ({"fixed_length": False, "expandable_segments": True}, "one GPU", "one GPU"),
    ],
)
def test_each_setup_uses_the_residual_row_of_its_class(changes: dict[str, Any], live: str, held: str) -> None:
    assert [class_of(step(**changes), counter) for counter in ("live", "held")] == [live, held]


def test_evaluation_memory_is_a_share_of_the_weights_one_batch_and_the_cache() -> None:
    logits = 8192 * V * 2 + 1024 * V * 8
    assert logits > 8192 * 2 * (4 * H + 3 * F)
    cache = 2 * L * LLAMA.kv_dim * 2048 * 2
    for gpus, block in ((1, 0), (2, 2 * LLAMA.parameters // L)):
        live = logits + H * 8192 * 2 + cache // gpus
        expected = 2 * LLAMA.parameters // gpus + block + int(live * 1.36) + CUDA_CONTEXT_BYTES
        assert evaluation.inference_bytes(LLAMA, gpus, 2048) == expected
    experts = evaluation.inference_bytes(MIXTRAL, 1, 2048, lora_experts=True)
    routed = 2 * 2 * MIXTRAL.experts * 3 * MIXTRAL.hidden * MIXTRAL.ffn
    stream = 8192 * 2 * (4 * MIXTRAL.hidden + 3 * MIXTRAL.ffn) + routed
    cache = 2 * MIXTRAL.layers * MIXTRAL.kv_dim * 2048 * 2
    live = stream + MIXTRAL.hidden * 8192 * 2 + cache
    assert experts == 2 * MIXTRAL.parameters + int(live * 1.36) + CUDA_CONTEXT_BYTES
