"""Temporary buffers next to states and activations: gathered weights, reduced gradients, temporaries."""

from __future__ import annotations

from dataclasses import dataclass

from estimator.memory import implementations
from estimator.memory.shape import Part, shape_of
from estimator.memory.states import (
    NF4_PLAIN_SCALE_BYTES,
    NF4_SCALE_BYTES,
    NF4_WEIGHT_BYTES,
    base_bytes,
    compute_size,
    divides_scales,
    divisor,
    fsdp1,
    gradient_size,
    has_flat_gradients,
    offloads_states,
    process_share,
    share,
    state_bytes,
    trained_parameters,
)
from estimator.setup import Setup
from estimator.vocabulary import SHARDINGS

# DeepSpeed: launchers/engines/deepspeed/config.py sets the bucket (keep them equal); the rest are the
# defaults of runtime/zero/config.py in DeepSpeed 0.19.
DEEPSPEED_BUCKET = 200_000_000  # elements
ZERO3_LIVE_PARAMETERS = 1_000_000_000
ZERO3_PREFETCH = 50_000_000
ZERO3_SUB_GROUP = 1_000_000_000
# Bytes that ZeRO-3 leaves in the allocator's cache for each live parameter: 13 GiB, whatever the sequence
# length, in 21 runs of Qwen 1.8B, 7B and 72B (QwenLM/Qwen, README, sequences of 256 to 8,192 tokens).
ZERO3_CACHED = 14

# Number of gathered blocks: the computing one and the prefetched one. FSDP1 frees one more late, as its rate
# limiter allows two all-gathers in flight
# (torch/distributed/fsdp/_limiter_utils.py).
BLOCKS_FSDP2, BLOCKS_FSDP1 = 2, 3


@dataclass(frozen=True, slots=True)
class Buffers:
    """Bytes of communication buffers of one process at each moment of a step.

    ``reduced`` are the inputs of reduce-scatters. The allocator keeps them separate from other memory and
    reserves ``reduced_total``, which includes those that FSDP2 frees before the peak.
    """

    at_loss: int  # weights that are still gathered between forward and backward pass
    gathered: int  # weights in the backward pass
    backward: int  # weights and gradients of the blocks in flight
    reduced: int
    last: int  # gradients of the embedding, at the end of the backward pass
    reduced_total: int
    waiting: int = 0  # unsharded gradients that wait for that of the embedding
    forward: int = 0  # prefetch of the first block: it and the root exist twice, gathered and as shards


NONE = Buffers(0, 0, 0, 0, 0, 0)


def buffers(setup: Setup, part: Part) -> Buffers:
    """Return the communication buffers of one process that holds ``part`` of the model."""
    stage = setup.zero_stage
    if stage is not None:
        return _deepspeed(setup, stage, part)
    size = gradient_size(setup)
    trained = trained_parameters(setup, part)
    if SHARDINGS[setup.sharding].fsdp and setup.shard > 1:
        return _fsdp(setup, part, trained)
    if setup.fsdp_in_one_process:
        return _fsdp_in_one_process(setup, part, trained)
    if setup.engine == "megatron" and setup.sharding in ("zero1", "ddp"):
        return NONE  # gradients are in the buckets already
    if setup.replicate * setup.shard > 1 or setup.context > 1:
        bucket = size * trained  # DDP copies gradients into buckets (gradient_as_bucket_view=False)
        return Buffers(0, 0, bucket, 0, bucket, 0)
    return NONE


def _fsdp(setup: Setup, part: Part, trained: int) -> Buffers:
    """Return the buffers of FSDP: gathered weights, and gradients to reduce.

    The computing block and the prefetched one are gathered; two reduce-scatters have their inputs, in the
    type of the weights; the root's weights (embedding, head, last norm) always stay gathered.
    Zhao et al. 2023 (arXiv:2304.11277), section 3.3; torch.distributed.fsdp.fully_shard, which never reshards
    the root. Without resharding, and in a pipeline, all blocks stay gathered (torchtitan, apply_fsdp).
    """
    code, size = implementations.of(setup), compute_size(setup)
    block = _block_bytes(setup, part)
    root = part.untied_head if code.root_stays == "head" else part.untied_head + part.embedding
    if code.root_stays == "head" and setup.model.tied_embeddings:
        root = max(part.embedding, part.head)
    stays_gathered = setup.sharding == "shard_grad_op" or setup.pipeline > 1
    prefetched = BLOCKS_FSDP1 if fsdp1(setup) else BLOCKS_FSDP2
    gathered = size * root + (block * part.layers if stays_gathered else min(prefetched, part.layers) * block)
    if setup.tensor > 1:
        gathered += int(code.kept_unsharded * part.parameters)
    at_loss = 0 if code.root_stays == "backward" and not stays_gathered else gathered
    reduce_size = gradient_size(setup)
    if has_flat_gradients(setup):
        block_gradients = size * part.block
        reduced = 0 if setup.accumulation > 1 else 2 * block_gradients
        return Buffers(at_loss, gathered, gathered + block_gradients, reduced, 0, reduced)
    starting = 2 * (size * root + block) if code.root_stays == "backward" else 0
    if setup.adapters:
        inner = share(trained, max(part.layers, 1))
        reduced = 2 * reduce_size * inner
        # A root gathered again for the backward pass exists twice: gathered, and as its parts
        fetched = (
            max(gathered, 2 * size * root)
            if code.root_stays == "backward" and not stays_gathered
            else gathered
        )
        return Buffers(at_loss, fetched, gathered + size * inner, reduced, 0, reduced, forward=starting)
    head = reduce_size * part.untied_head
    embedding = size * part.embedding
    reduced_total = max(2 * reduce_size * part.block, head)
    if fsdp1(setup) or code.root_stays != "backward":
        return Buffers(
            at_loss, gathered, gathered + size * part.block, reduced_total, embedding, reduced_total
        )
    # The head waits for the embedding, as both are one group; a block's first gradient is that of its last
    # product, and of the reduce-scatters' inputs one is alive.
    first = size * min(shape_of(setup.model).largest_linear // setup.tensor, part.block)
    fetched = gathered if stays_gathered else gathered - size * part.block  # one block, as none computes
    reduced = reduce_size * part.block
    return Buffers(
        at_loss, fetched, gathered + first, reduced, size * root, reduced_total, size * part.head, starting
    )


def _fsdp_in_one_process(setup: Setup, part: Part, trained: int) -> Buffers:
    """Return the buffers of FSDP2 in a single process, which copies weights instead of gathering them.

    torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py, wait_for_unshard: a group's weights are copied
    when it computes, without prefetching, and the root's copy is freed after the forward pass.
    _fsdp_collectives.py, foreach_reduce: gradients are copied in the type of the reduction, and then into a
    result of the same size, while the copy of the previous group still exists.
    """
    size, reduce_size = compute_size(setup), gradient_size(setup)
    block, root = _block_bytes(setup, part), size * (part.untied_head + part.embedding)
    if setup.adapters:
        reduced = 2 * reduce_size * share(trained, max(part.layers, 1))
        return Buffers(0, root, root + block, reduced, 0, reduced, forward=root + block)
    reduced = reduce_size * part.block
    first = size * min(shape_of(setup.model).largest_linear, part.block)
    root_gradients = reduce_size * (part.untied_head + part.embedding)
    # The root's 16-bit gradients next to its weights; then the weights are freed and both copies exist
    last = max(root, 2 * root_gradients - root - reduced)
    return Buffers(
        0,
        root,
        root + block + first,
        reduced,
        last,
        2 * root_gradients,
        size * part.head,
        forward=root + block,
    )


def _block_bytes(setup: Setup, part: Part) -> int:
    """Return the bytes of one gathered block; quantized weights are gathered without dequantization."""
    size = compute_size(setup)
    if setup.quantization == "none":
        return size * part.block
    scale = NF4_SCALE_BYTES if divides_scales(setup) else 0.0
    bytes_each = 1.0 if setup.quantization == "int8" else NF4_WEIGHT_BYTES + scale
    return int(part.block_linear * bytes_each) + size * (part.block - part.block_linear)


def _deepspeed(setup: Setup, stage: int, part: Part) -> Buffers:
    """Return the buffers of DeepSpeed: its buckets, two of them if communication overlaps.

    Stage 3 adds live and prefetched parameters (https://www.deepspeed.ai/docs/config-json/).
    """
    if setup.data_parallel * setup.shard == 1 and not stage:
        return NONE
    size = compute_size(setup)
    bucket = size * min(DEEPSPEED_BUCKET, trained_parameters(setup, part))
    cuda = setup.device == "cuda"
    if stage == 0:
        total = bucket
    elif stage < 3:
        total = bucket * (3 if cuda else 2)  # reduce (double when overlapped), gather
    else:
        # the limits count elements of the storage type; quantized weights have fewer of them
        live = min(size * (ZERO3_LIVE_PARAMETERS + ZERO3_PREFETCH), base_bytes(setup, part, size))
        total = bucket * (2 if cuda else 1) + live
    return Buffers(total, total, total, 0, 0, 0)


def cached_bytes(setup: Setup, part: Part) -> int:
    """Return the bytes that ZeRO-3 leaves in the allocator's cache; activations reuse a part."""
    if setup.zero_stage != 3 or setup.device != "cuda":
        return 0
    return ZERO3_CACHED * min(ZERO3_LIVE_PARAMETERS, part.parameters)


def optimizer_temporary_bytes(setup: Setup, part: Part) -> int:
    """Return the temporary memory of the optimizer's step, in bytes.

    Fused, 8-bit and paged AdamW on GPUs: nothing. torch's foreach AdamW: the square roots of all second
    moments at once, as large as the trained weights (torch/optim/adam.py, _multi_tensor_adam).
    On a CPU, tensor by tensor: about two copies of the largest tensor (torch.optim.adamw,
    _single_tensor_adamw). Muon: Newton-Schulz on the largest matrix in bf16, three copies and a square.
    DeepSpeed: the fp32 gradients of its partition, in sub-groups at stage 3
    (runtime/zero/stage_1_and_2.py and stage3.py, step).
    """
    stage = setup.zero_stage
    trained = trained_parameters(setup, part)
    largest = max(setup.model.vocab * setup.model.hidden, shape_of(setup.model).largest_linear)
    if setup.prompts:
        largest = max(setup.llama_adapter.prompt_length * setup.model.hidden, setup.model.vocab)
    elif setup.adapters:
        largest = setup.lora_rank * max(setup.model.ffn, setup.model.hidden, setup.model.q_dim)
    muon = 4 * 2 * shape_of(setup.model).largest_linear if setup.optimizer == "muon" else 0
    if stage is not None:
        if offloads_states(setup):
            return 0
        partition = share(trained, divisor(setup, "optimizer"))
        return muon + 4 * (min(partition, ZERO3_SUB_GROUP) if stage == 3 else partition)
    if setup.device == "cuda":
        return muon + (_foreach_bytes(setup, part, trained) if setup.optimizer == "adamw" else 0)
    return muon + 2 * gradient_size(setup) * share(largest, divisor(setup, "optimizer"))


def _foreach_bytes(setup: Setup, part: Part, trained: int) -> int:
    """Return the bytes of the second moments' square roots in torch's foreach AdamW; 0 for the fused one."""
    if implementations.fuses_optimizer(setup):
        return 0
    if setup.optimizer_in_backward or offloads_states(setup):
        return 0
    size = state_bytes(setup)[2] / 2  # of one of the two moments
    return process_share(setup, part, int(trained * size), "optimizer")


def dequantized_bytes(setup: Setup) -> int:
    """Return the bytes of the largest quantized tensor after dequantization to the compute type.

    bitsandbytes, MatMul4Bit; launchers/engines/loop/quantized.py, also for int8. The loop dequantizes one
    tensor of all experts of a block at a time (quantized_experts.py): the first, gate and up projection
    joined. Scales in 8 bits are dequantized to fp32 first (quantized.py, plain_scales). 0 if products use
    quantized weights directly.
    """
    if setup.quantization == "none" or (setup.quantization == "int8" and not setup.runs_loop):
        return 0
    shape = shape_of(setup.model)
    largest = shape.largest_linear
    if setup.runs_loop:
        joined, matrices = (2, 3) if setup.model.gated_mlp else (1, 2)
        largest = max(largest, shape.experts_linear * joined // matrices)
    if setup.engine == "litgpt":
        largest = max(largest, setup.model.vocab * setup.model.hidden)
    plain_scales = setup.quantization == "nf4-double" and setup.runs_loop
    scales = int(NF4_PLAIN_SCALE_BYTES * largest) if plain_scales else 0
    return compute_size(setup) * -(-largest // setup.tensor) + scales
