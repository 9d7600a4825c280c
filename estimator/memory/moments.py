"""Moments of a run at which memory can peak, and the largest of them.

Loading, if a process loads more than it keeps. In a step: the loss, the backward passes of the last block,
the first block and the embedding, and the optimizer's step. Each is a sum of live tensors. In a pipeline the
first stage has the most micro batches in flight, and the last one has the logits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

from estimator.memory import diffusion, implementations, latents
from estimator.memory.activations.block import (
    backward_bytes,
    block_bytes,
    boundary_bytes,
    frozen_input_bytes,
    head_input_bytes,
    selective_bytes,
)
from estimator.memory.buffers import buffers, cached_bytes, dequantized_bytes, optimizer_temporary_bytes
from estimator.memory.generation import ACTIVATIONS, CACHE, CACHE_HELD, LOGITS, grpo_batch, live_bytes
from estimator.memory.logits import Logits, loss_bytes
from estimator.memory.residuals import varies
from estimator.memory.shape import Part, part_of, stages
from estimator.memory.states import (
    compute_size,
    divides_scales,
    fsdp1,
    keeps_embedding_gradient,
    late_gradient_bytes,
    loaded_bytes,
    process_share,
    scale_bytes,
    states,
)
from estimator.models import DiffusionSpec
from estimator.setup import Setup

# Offloaded activations remain on the GPU until they are copied. Without checkpointing, half of them had been
# copied at a run's peak (torchtitan@9dc418a8b); with checkpointing, torchtune keeps those of the last blocks
# (training/_activation_offloading.py, OffloadActivations).
OFFLOADED_WITHOUT_CHECKPOINTING = 0.5
BLOCKS_NOT_YET_OFFLOADED = 2

# Batches of varying length: tokens of the batch before the longest one, as a share of the longest. litgpt's
# QLoRA runs on Alpaca at up to 512 tokens are between 0.5 and 1.
LENGTH_BEFORE_THE_LONGEST = 0.75
# Tokens of the longest batch after the longest one, as a share of it: litgpt's LoRA runs with FSDP, same data
LATER_LENGTH = 0.5


# Batches of varying length leave blocks in the allocator's cache, as logits and one block's activations are
# allocated in another size for each batch. Their bytes, as a multiple of those tensors: the median of 74 runs
# of ms-swift (modelscope/ms-swift@b40f31df7^, Benchmark.md); half of the runs are between 1.4 and 2.9.
LEFT_BY_LENGTHS = 2.4


# Categories that persist between steps
STATES = (
    "weights",
    "master weights",
    "reference model",
    "reward model",
    "adapters",
    "gradients",
    "optimizer",
    diffusion.AVERAGE,
)


@dataclass(frozen=True, slots=True)
class Peak:
    """Moment of a step at which one process needs the most memory, in bytes."""

    categories: dict[str, int]  # live bytes by category
    reserved_extra: int  # reserved but unusable: memory of other streams, blocks that do not fit

    @property
    def active(self) -> int:
        """Live bytes at the peak."""
        return sum(self.categories.values())

    @property
    def states_bytes(self) -> int:
        """Persistent part of the peak: weights, gradients, optimizer states."""
        return sum(self.categories.get(name, 0) for name in STATES)

    @property
    def dynamic_bytes(self) -> int:
        """Rest of the peak: activations, logits, buffers, temporaries."""
        return self.active - self.states_bytes


@dataclass(frozen=True, slots=True)
class Moment:
    """Live bytes at one moment, without the states; ``other_streams``: those on other CUDA streams."""

    parts: dict[str, int]
    other_streams: int = 0

    @property
    def total(self) -> int:
        """Sum of the parts."""
        return sum(self.parts.values())

    def reserved_extra(self, streams: int) -> int:
        """Return the bytes that the allocator reserves in addition to live ones.

        Blocks belong to the stream that they were allocated on (PyTorch, c10/cuda/CUDACachingAllocator.cpp).
        FSDP's reduce-scatters run on a separate stream: their inputs and the sharded gradients cannot reuse
        memory freed by activations, so the peaks of both streams, in sum ``streams``, are reserved.
        """
        return max(streams - self.total, 0)

    def weighted(self, weight: float, streams: int) -> tuple[float, int]:
        """Return (live bytes plus reserved ones if ``streams`` is not 0, live bytes).

        ``weight``: factor for all live bytes except gradients.
        """
        gradients, total = self.parts.get("gradients", 0), self.total
        alive = gradients + weight * (total - gradients)
        return (alive + max(streams - total, 0) if streams else alive), total


def peak(setup: Setup, weight: float = 1.0, *, held: bool = True) -> Peak:
    """Return the largest moment of one process; in a pipeline, of the stage that needs the most.

    ``weight``: factor for live bytes other than states, by which the allocator reserves more than is live.
    ``held``: whether to include the bytes that the allocator reserves in addition.
    """
    first, *_ = stages(setup)
    peaks = [_stage_moments(setup, stage).peak(weight, held) for stage in stages(setup)]
    if loaded := loaded_bytes(setup, part_of(setup, first)):
        peaks.append(Peak({"weights": loaded}, 0))
    return max(
        peaks, key=lambda each: each.states_bytes + weight * each.dynamic_bytes + held * each.reserved_extra
    )


@dataclass(frozen=True, slots=True)
class StageMoments:
    """Moments of a step in one process of a pipeline stage, in bytes."""

    constant: dict[str, int]  # by category, throughout the step
    moments: list[Moment]
    streams: int  # sum of the peaks of the streams
    unfitting: int  # reserved in addition, as freed blocks do not fit later tensors
    cached: int = 0  # cached bytes of earlier moments, partly reused: added in quadrature
    cached_by_lengths: int = 0  # left by batches of other lengths; reusable by the optimizer step

    def peak(self, weight: float, held: bool) -> Peak:
        """Return the largest moment, as :func:`peak` weighs it."""
        streams = self.streams * held

        def reserved(moment: Moment) -> tuple[float, int]:
            alive, total = moment.weighted(weight, streams)
            return alive + self._length_cache(moment) * held, total

        largest = max(self.moments, key=reserved)
        names = self.constant | largest.parts
        joined = {name: self.constant.get(name, 0) + largest.parts.get(name, 0) for name in names}
        result = Peak(
            categories={name: size for name, size in joined.items() if size},
            reserved_extra=largest.reserved_extra(self.streams)
            + self.unfitting
            + self._length_cache(largest),
        )
        dynamic = result.dynamic_bytes + result.reserved_extra
        return replace(
            result, reserved_extra=result.reserved_extra + int(math.hypot(dynamic, self.cached)) - dynamic
        )

    def _length_cache(self, moment: Moment) -> int:
        return 0 if "optimizer temporaries" in moment.parts else self.cached_by_lengths


@lru_cache(maxsize=16)  # needed and shown memory are derived from the same moments
def _stage_moments(setup: Setup, stage: str) -> StageMoments:
    part = part_of(setup, stage)
    constant = states(setup, stage)
    gradients = constant.pop("gradients")
    if isinstance(setup.model, DiffusionSpec):
        return _unet_moments(setup, setup.model, part, constant, gradients)
    if divides_scales(setup):  # otherwise they count as weights
        constant["quantization overhead"] = scale_bytes(setup, part)
    logits = loss_bytes(setup, part, setup.tokens)
    block_per_token = block_bytes(setup)
    moments = _moments(setup, part, gradients, logits, block_per_token)
    return StageMoments(
        constant=constant,
        moments=moments,
        streams=max(moment.total - moment.other_streams for moment in moments)
        + max(moment.other_streams for moment in moments),
        unfitting=logits.unfitting + min(int(setup.tokens * _unfitting(setup, block_per_token)), logits.peak),
        cached=cached_bytes(setup, part),
        cached_by_lengths=_cached_by_lengths(setup, logits, block_per_token),
    )


def _cached_by_lengths(setup: Setup, logits: Logits, block_per_token: float) -> int:
    """Return the bytes that batches of varying lengths leave in the allocator's cache."""
    if not varies(setup) or setup.device == "cpu":
        return 0
    block = int(setup.tokens * (block_per_token + backward_bytes(setup)))
    return int(LEFT_BY_LENGTHS * (logits.peak + block))


def _unet_moments(
    setup: Setup, model: DiffusionSpec, part: Part, constant: dict[str, int], gradients: int
) -> StageMoments:
    """Return the moments of a UNet's step."""
    if model.keeps_average:
        constant[diffusion.AVERAGE] = diffusion.average_bytes(setup)
    if model.trains_texts and not model.loads_encoders:
        encoder_parameters = sum(encoder.parameters for encoder in model.texts)
        constant[diffusion.TEXTS] = process_share(
            setup, part, encoder_parameters * compute_size(setup), "weights"
        )
    if model.loads_encoders:
        constant[diffusion.ENCODERS] = latents.network_bytes(model, on_gpu=setup.device == "cuda")
    categories = diffusion.moments(setup, model, part, gradients, buffers(setup, part))
    moments = [Moment(parts) for parts in categories]
    return StageMoments(constant, moments, streams=max(moment.total for moment in moments), unfitting=0)


def _unfitting(setup: Setup, block_per_token: float) -> float:
    """Return the bytes per token that the allocator reserves additionally, as freed blocks cannot be reused.

    The tensors of a recomputed block have many sizes, which do not fit into the freed blocks of the logits.
    """
    if not checkpointed(setup) or setup.compile or setup.device == "cpu":
        return 0.0
    return block_per_token


def _moments(
    setup: Setup, part: Part, gradients: int, logits: Logits, block_per_token: float
) -> list[Moment]:
    tokens = setup.tokens
    communication = buffers(setup, part)
    saved, block, boundary = _activations(setup, part, block_per_token)
    last = _last_saved(setup, part)
    held_gradients = _held_gradients(setup, gradients)
    head = _head_gradient(setup, part)
    late = late_gradient_bytes(setup, part)
    dequantized = dequantized_bytes(setup)
    streams = (setup.shard > 1 or setup.fsdp_in_one_process) and setup.device == "cuda"
    early = held_gradients if setup.optimizer_in_backward else max(held_gradients, min(head, gradients))
    in_backward = block if checkpointed(setup) else int(tokens * backward_bytes(setup))
    return [
        *_answer_generation(setup),
        *_later_batch(setup, saved + last, logits.peak, communication.at_loss, gradients),
        Moment(
            {
                "activations": boundary,
                "gradients": held_gradients,
                "communication buffers": communication.forward,
            },
            held_gradients if streams else 0,
        ),
        Moment(
            {
                "activations": saved + last + stale_bytes(setup, part),
                "logits and loss": logits.peak + _kept_outputs(setup, part, tokens),
                "gradients": held_gradients,
                "communication buffers": communication.at_loss,
            },
            held_gradients if streams else 0,
        ),
        Moment(
            {
                "activations": saved + last + stale_bytes(setup, part),
                "logits and loss": logits.summed,
                "gradients": held_gradients + logits.head_gradient,
                "communication buffers": communication.gathered,
            },
            held_gradients if streams else 0,
        ),
        Moment(
            {
                "activations": saved + in_backward + _unfreed_gradients(setup, saved),
                "logits and loss": logits.held,
                "gradients": held_gradients + communication.waiting
                if communication.waiting
                else max(early, head),
                "communication buffers": communication.backward + communication.reduced,
                "quantization overhead": dequantized,
            },
            communication.reduced_total + (early if streams else 0),
        ),
        Moment(
            {
                "activations": boundary + block,
                "logits and loss": logits.held,
                "gradients": max(gradients - late + communication.waiting, head, held_gradients),
                "communication buffers": communication.backward + communication.reduced,
                "quantization overhead": dequantized,
            },
            communication.reduced_total + (gradients if streams else 0),
        ),
        Moment(
            {
                "activations": boundary,
                "logits and loss": logits.held,
                "gradients": gradients,
                "communication buffers": communication.gathered + communication.reduced + communication.last,
            },
            communication.reduced_total + (gradients if streams else 0),
        ),
        Moment(
            {"gradients": gradients, "optimizer temporaries": optimizer_temporary_bytes(setup, part)},
            gradients if streams else 0,
        ),
    ]


def saved_bytes(setup: Setup) -> int:
    """Return the activations that are live when the loss is computed, in the last pipeline stage."""
    part = part_of(setup, stages(setup)[-1])
    saved, _, _ = _activations(setup, part, block_bytes(setup))
    return saved + _last_saved(setup, part) + stale_bytes(setup, part)


def _last_saved(setup: Setup, part: Part) -> int:
    """Return the bytes that the last norm and the output head save."""
    return int(setup.tokens * head_input_bytes(setup)) if part.last else 0


def _unfreed_gradients(setup: Setup, saved: int) -> int:
    """Return the bytes of gradients of block outputs that FSDP1 frees late if weights are frozen.

    They are as large as the checkpoints: with LoRA and QLoRA under FSDP1, the Trainer's backward pass (but
    not the loss) needs one more checkpoint per block than on one GPU
    (foundation-model-stack/fms-acceleration, scripts/benchmarks/refs).
    """
    frozen = implementations.of(setup).outputs_kept and setup.adapters and fsdp1(setup)
    return saved if frozen and checkpointed(setup) else 0


def _answer_generation(setup: Setup) -> list[Moment]:
    """Return the moment of answer generation, before the step has gradients; none without generation.

    A GPU holds two copies of the KV cache (``CACHE_HELD``).
    """
    if not setup.answer_len:
        return []
    live = live_bytes(setup.model, grpo_batch(setup), bytes_each=compute_size(setup))
    cache_copies = CACHE_HELD if setup.device == "cuda" else 1
    return [
        Moment(
            {
                CACHE: cache_copies * live[CACHE],
                "activations": live.get(ACTIVATIONS, 0),
                "logits and loss": live.get(LOGITS, 0),
            }
        )
    ]


def _activations(setup: Setup, part: Part, block_per_token: float) -> tuple[int, int, int]:
    """Return the bytes saved for the backward pass, live in one block's backward pass, and of its input."""
    tokens = setup.tokens
    boundary = boundary_bytes(setup)
    passes = in_flight(setup, part)
    block = int(tokens * (block_per_token + backward_bytes(setup)))
    layers = max(part.layers - setup.idle_blocks, 0)
    frozen_input = frozen_input_bytes(setup) if part.first else 0
    if not checkpointed(setup):
        saved = tokens * (layers * block_per_token - frozen_input)
        if setup.activation_offload:
            saved *= 1 - OFFLOADED_WITHOUT_CHECKPOINTING
    else:
        per_block = boundary + (selective_bytes(setup) if setup.checkpointing == "selective" else 0)
        recomputed = layers // setup.recompute_every
        not_recomputed = layers - recomputed
        if setup.activation_offload:
            recomputed = min(recomputed, BLOCKS_NOT_YET_OFFLOADED)
        saved = tokens * (recomputed * per_block + not_recomputed * block_per_token)
        if not_recomputed:  # the first block is one of these
            saved -= tokens * frozen_input
    mask = setup.sequences * setup.seq_len**2 // setup.context if setup.document_mask else 0
    copies = _copied_experts(setup, part)
    saved_copies = 0 if checkpointed(setup) else copies * (layers - 1)
    # the computing block has a copy, and its gradient or the product of both adapter matrices
    block += 2 * copies
    return (
        int(saved * passes) + mask + _cast_weights(setup, part) + saved_copies,
        block,
        int(tokens * boundary),
    )


def _copied_experts(setup: Setup, part: Part) -> int:
    """Return the bytes of a copy of one block's experts with merged adapters, saved for the backward pass.

    peft/tuners/lora/layer.py, ParamWrapper, merges in each forward pass.
    """
    if not setup.copies_experts:
        return 0
    return compute_size(setup) * part.experts // max(part.layers - setup.model.dense_layers, 1)


def _cast_weights(setup: Setup, part: Part) -> int:
    """Return the bytes of 16-bit copies of fp32 weights that autocast keeps for the backward pass.

    torch.amp; Accelerate's table counts them as gradients. Of one block only if blocks are recomputed.
    """
    if not setup.precision.endswith("autocast") or setup.quantization != "none":
        return 0
    return 2 * (part.block_linear if checkpointed(setup) else part.blocks_linear + part.untied_head)


def checkpointed(setup: Setup) -> bool:
    """Return whether blocks are recomputed in the backward pass.

    Megatron-Core's "selective" only recomputes attention scores, which flash attention never stores
    (arXiv:2205.05198, section 5).
    """
    if setup.checkpointing == "selective":
        return setup.engine != "megatron"
    return setup.checkpointing == "full"


def in_flight(setup: Setup, part: Part) -> float:
    """Return the number of micro batches whose activations a pipeline stage holds at the same time.

    1F1B: the number of stages from this one to the last (Narayanan et al. 2019, PipeDream); interleaved over
    v chunks: 1 + (p - 1) / (p v) times p (Narayanan et al. 2021, arXiv:2104.04473, section 2.2;
    Megatron's penalty in theoretical_memory_usage.py); zero bubble: p on every
    stage (Qi et al. 2023, arXiv:2401.10241, section 5); all forward, all backward (afab): all of them; layers
    distributed over GPUs without a pipeline (split): one.
    """
    p = setup.pipeline
    if p == 1 or setup.schedule == "split":
        return 1.0
    micro_batches = setup.accumulation
    if setup.schedule == "afab":
        return float(micro_batches)
    if setup.schedule == "zero-bubble":
        return float(min(micro_batches, p))
    if setup.schedule == "interleaved" and setup.virtual_stages > 1:
        v = setup.virtual_stages
        peak_count = p * (1 + (p - 1) / (p * v)) if part.first else p * (v - 1) / v + 1 / v
        return float(min(micro_batches, peak_count))
    return float(min(micro_batches, p if part.first else 1))


def _single_longest_first(setup: Setup) -> bool:
    """Return whether the first batch is the only one of full length, and starts without gradients."""
    first = setup.longest_once and setup.longest_first
    return first and setup.zero_stage is None and setup.pipeline == 1 and setup.quantization == "none"


def _later_batch(setup: Setup, saved: int, logits: int, gathered: int, gradients: int) -> list[Moment]:
    """Return the moment of a later, shorter batch's loss, with gradients of earlier ones; otherwise none."""
    if not _single_longest_first(setup):
        return []
    parts = {
        "activations": int(LATER_LENGTH * saved),
        "logits and loss": int(LATER_LENGTH * logits),
        "gradients": gradients,
        "communication buffers": gathered,
    }
    return [Moment(parts, gradients if setup.shard > 1 else 0)]


def _held_gradients(setup: Setup, gradients: int) -> int:
    """Return the bytes of gradients before the backward pass: of earlier micro batches, or buffers.

    If the first batch is the only one of full length, it has none; ``_later_batch`` covers later ones.
    """
    if _single_longest_first(setup):
        return 0
    if setup.accumulation > 1 or setup.zero_stage is not None or setup.pipeline > 1:
        return gradients
    if setup.engine != "litgpt":
        return 0
    if keeps_embedding_gradient(setup):
        return min(gradients, setup.model.vocab * setup.model.hidden * compute_size(setup))
    return gradients  # litgpt accumulates up to 16 sequences (finetune/full.py, TrainArgs.global_batch_size)


def _head_gradient(setup: Setup, part: Part) -> int:
    """Return the bytes of the unsharded gradient of the head, the first one of the backward pass."""
    if setup.adapters and "lm_head" not in setup.trained_modules:
        return 0
    return part.head * compute_size(setup)


def _kept_outputs(setup: Setup, part: Part, tokens: int) -> int:
    """Return the bytes of the last stage's outputs, which pipeline schedules keep per micro batch.

    torch/distributed/pipelining/stage.py, output_chunks.
    """
    if setup.pipeline == 1 or not part.last or setup.engine == "megatron" or setup.schedule == "split":
        return 0
    return setup.accumulation * tokens * -(-setup.model.vocab // setup.tensor) * compute_size(setup)


def stale_bytes(setup: Setup, part: Part) -> int:
    """Return the bytes that the graph of the previous step still holds during the forward pass.

    bitsandbytes before 0.43 keeps each 4-bit product's input as an attribute of the graph
    (autograd/_functions.py, MatMul4Bit), which lives as long as the loss does: in litgpt's loop, until the
    next step's loss (litgpt/finetune/lora.py). litgpt asks for bitsandbytes 0.42.
    """
    if setup.engine != "litgpt" or setup.quantization == "none":
        return 0
    model, layers = setup.model, part.layers - setup.idle_blocks
    # the inputs of attention, of its output projection, of the MLP and of its last product
    inputs = (2 * model.hidden + model.attention_out_dim + model.ffn) * compute_size(setup)
    last_step = 0 if setup.longest_once else LENGTH_BEFORE_THE_LONGEST * inputs
    return int(setup.tokens * layers * (inputs + last_step))
