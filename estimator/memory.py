"""Peak memory of one process, by category, from closed formulas.

A training step has four moments at which memory can peak: the loss, the start of the backward pass, its
end, and the optimizer's step. Each is the sum of what is alive then; the largest is the prediction.

Letters as in the papers: P parameters, T tokens of one micro batch, h hidden size, f MLP width,
V vocabulary, L layers, n processes that share the states.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from estimator.models import MLP_PROJECTIONS
from estimator.plan import GIB, MemoryEstimate
from estimator.setup import Setup

CATEGORIES = (
    "weights",
    "master weights",
    "adapters",
    "gradients",
    "optimizer",
    "activations",
    "logits and loss",
    "communication buffers",
    "optimizer temporaries",
    "NF4 overhead",
    "runtime",
    "fragmentation",
)

# NF4 with double quantisation: 4 bits a weight, an 8-bit scale for each block of 64, an fp32 scale for each
# 256 of those. Dettmers et al. 2023, QLoRA (arXiv:2305.14314), section 3.
NF4_WEIGHT_BYTES = 0.5
NF4_SCALE_BYTES = 1 / 64 + 4 / (64 * 256)

# torchtune's CEWithChunkedOutputLoss, torchtune 0.6.1 (modules/loss/ce_chunked_output_loss.py)
LOSS_CHUNKS = 8

# CUDA context of one process 0.47-0.92 GiB, and 1.5 GiB more at NCCL's first collective: measured on A100s
# in stas00/ml-engineering, training/performance. Outside PyTorch's allocator.
CUDA_CONTEXT_BYTES = int(0.75 * GIB)
NCCL_BYTES = int(1.5 * GIB)

# Python, torch and an engine, imported, in one process without a GPU: resident 0.43 to 0.46 GiB with
# torchtune and with DeepSpeed, 0.1 more with a process group (torch 2.13+cpu, torchtune 0.6.1,
# DeepSpeed 0.19.8, Linux).
CPU_RUNTIME_BYTES = int(0.45 * GIB)
GLOO_BYTES = int(0.1 * GIB)

# DeepSpeed: launchers/engines/deepspeed_config.py sets the bucket (keep them equal); the rest are the
# defaults of runtime/zero/config.py in DeepSpeed 0.19.
DEEPSPEED_BUCKET = 200_000_000  # elements
ZERO3_LIVE_PARAMETERS = 1_000_000_000
ZERO3_PREFETCH = 50_000_000
ZERO3_SUB_GROUP = 1_000_000_000


# launchers/engines/deepspeed_batches.py, LOSS_CHUNK: positions whose logits are in fp32 at a time
DEEPSPEED_LOSS_POSITIONS = 1024


@dataclass(frozen=True, slots=True)
class Residual:
    """How measured memory compares with the sum of the live tensors, for one class of runs."""

    reserved: float  # what the caching allocator reserves, over what is active in it
    width: float  # the upper bound, over the likely value, less 1
    basis: str


# From published peaks against this module's sums (tests/estimator/published.csv). Active memory of 9 runs on
# one GPU and 2 on eight: -2 to +5 %. Reserved over active: FSDP2 1.09 without checkpointing, 1.17 to 1.43
# with it; one GPU 1.02 to 1.05 at a fixed length (torchtitan, litgpt), 1.15 to 1.25 with lengths that vary
# (LLaMA-Cookbook PR 41, ms-swift Benchmark.md). Nothing was published for ZeRO that can be mapped.
# On a CPU: resident memory of 7 runs of tiny-llama (full, LoRA, transformers; 4,096 and 16,384 tokens; with
# and without checkpointing), 1.02 to 1.9 times the live tensors: the C library keeps what is freed.
RESIDUALS = {
    "one GPU, fixed length": Residual(1.05, 0.15, "published torchtune and litgpt runs on one GPU"),
    "one GPU": Residual(1.15, 0.15, "published runs on one GPU with lengths that vary"),
    "fsdp": Residual(1.10, 0.15, "published torchtitan FSDP2 runs"),
    "fsdp, checkpointing": Residual(1.28, 0.15, "published torchtitan FSDP2 runs with checkpointing"),
    "zero": Residual(1.20, 0.25, "no published runs that state enough; a wide margin"),
    "cpu": Residual(1.30, 0.30, "runs of tiny-llama on one CPU, 1.0 to 1.9 times the live tensors"),
}


def estimate(setup: Setup, *, capacity_bytes: int | None = None) -> MemoryEstimate:
    """Peak memory of one process of ``layout``, and the host memory of one of its nodes.

    Parameters
    ----------
    capacity_bytes:
        What one GPU (on a CPU, one process's share of the memory) offers, if known.
    """
    parts = active(setup)
    residual = residual_of(setup)
    parts["fragmentation"] = int((residual.reserved - 1) * sum(parts.values()))
    parts["runtime"] = runtime_bytes(setup)
    likely = sum(parts.values())
    upper = int(likely * (1 + residual.width))
    return MemoryEstimate(
        categories=tuple((name, parts[name]) for name in CATEGORIES if parts.get(name)),
        upper_bytes=upper,
        capacity_bytes=capacity_bytes,
        host_bytes=upper * setup.processes_per_node if setup.device == "cpu" else host_bytes(setup),
        basis=f"+{residual.width:.0%}: {residual.basis}",
    )


def residual_of(setup: Setup) -> Residual:
    """The row of ``RESIDUALS`` for this class of run."""
    if setup.device == "cpu":
        return RESIDUALS["cpu"]
    if setup.sharding == "fsdp":
        return RESIDUALS["fsdp, checkpointing" if setup.checkpointing != "none" else "fsdp"]
    if setup.world_size > 1:
        return RESIDUALS["zero"]
    return RESIDUALS["one GPU, fixed length" if setup.fixed_length else "one GPU"]


def runtime_bytes(setup: Setup) -> int:
    """Memory of a process that holds no tensor yet, outside PyTorch's allocator."""
    if setup.device == "cpu":
        return CPU_RUNTIME_BYTES + (GLOO_BYTES if setup.world_size > 1 else 0)
    return CUDA_CONTEXT_BYTES + (NCCL_BYTES if setup.world_size > 1 else 0)


@lru_cache(maxsize=4096)
def states(setup: Setup) -> tuple[tuple[str, int], ...]:
    """Bytes of weights, master weights, adapters, gradients and optimizer states in one process.

    torchtune trains in the weights' own type and keeps both AdamW moments in it: 2 + 2 + 4 B a parameter
    in bf16 (torchtune 0.6.1, recipes/full_finetune_*.py), all divided by n under FSDP2.
    DeepSpeed with bf16 keeps an fp32 copy and fp32 moments: 2 + 2 + 4 + 8 B; stage 1 divides the last two
    by n, stage 2 the gradients as well, stage 3 the weights too. Rajbhandari et al. 2020, ZeRO
    (arXiv:1910.02054), section 3.1 and figure 1.
    Adapters: the base holds neither gradients nor states. Hu et al. 2021 (arXiv:2106.09685), section 4.2.
    """
    model, n = setup.model, setup.world_size
    fp32 = setup.precision == "fp32"
    size = 4 if fp32 else 2
    moments = {"adamw": 2, "sgd": 1}[setup.optimizer]
    trainable = setup.trainable_parameters
    stage = setup.zero_stage
    mixed_fsdp = stage is None and setup.precision == "bf16-mixed"  # FSDP2 with fp32 shards
    own = 4 if mixed_fsdp else size

    if setup.quantization != "none":
        base = int(model.linear_parameters * NF4_WEIGHT_BYTES)
        base += (model.parameters - model.linear_parameters) * size
    else:
        base = model.parameters * own
    shares = {  # by how many processes each part is divided
        "weights": n if setup.sharding in ("fsdp", "zero3") else 1,
        "adapters": n if setup.sharding in ("fsdp", "zero3") else 1,
        "gradients": n if setup.sharding in ("fsdp", "zero2", "zero3") else 1,
        "optimizer": n if setup.sharding in ("fsdp", "zero1", "zero2", "zero3") else 1,
    }
    result = {
        "weights": _share(base, shares["weights"]),
        "adapters": _share(trainable * own, shares["adapters"]) if setup.adapters else 0,
        "gradients": _share(trainable * own, shares["gradients"]),
    }
    if stage is None:
        result["optimizer"] = _share(trainable * own * moments, shares["optimizer"])
    else:
        # DeepSpeed's ZeRO optimizers copy their partition of the weights in fp32, also of fp32 weights
        copy = 0 if fp32 and stage == 0 else 4 * trainable
        result["master weights"] = _share(copy, shares["optimizer"])
        result["optimizer"] = _share(4 * moments * trainable, shares["optimizer"])
        if _offloaded(setup):
            result |= {"master weights": 0, "optimizer": 0, "gradients": 0}
    return tuple(result.items())


def _offloaded(setup: Setup) -> bool:
    """Whether the optimizer's states are in host memory instead of a GPU's."""
    return setup.offload != "none" and setup.device == "cuda" and bool(setup.zero_stage)


def layer_activation_bytes(setup: Setup) -> int:
    """What one block keeps for its backward pass, for one token.

    Eager, all weights trained: per block 24h + 8f bytes in bf16. Two norms keep input, fp32 copy and output
    (16h); attention keeps queries, expanded keys and values, and its output (8 query widths); the gated MLP
    keeps four tensors of width f. With adapters the norms' inputs are not needed: 20h + 8f. Compiled, the
    partitioner keeps 16h + 6f. Found by tracing torchtune's Llama 3.2 3B and Llama 3 8B (45.4h and 52h
    eager, 32h and 37h compiled); the count by hand follows Korthikanti et al. 2022 (arXiv:2205.05198),
    section 4, with flash attention and a gated MLP. fp32 doubles it.
    """
    model = setup.model
    experts = max(model.experts_per_token, 1)
    if setup.compile:
        width = 8 * model.hidden + 8 * model.q_dim + 6 * model.ffn * experts
    else:
        width = (12 if setup.adapters else 16) * model.hidden + 8 * model.q_dim + 8 * model.ffn * experts
    if model.experts:
        width += 4 * model.hidden * experts  # each expert's input and weighted output
    if setup.adapters:  # the narrow side of each adapter
        mlp_targets = sum(target in MLP_PROJECTIONS for target in setup.lora_targets)
        width += 2 * setup.lora_rank * (len(setup.lora_targets) + mlp_targets * (experts - 1))
    width *= 2 if setup.precision == "fp32" else 1
    return width + 4 * model.heads  # logsumexp of flash attention


def loss_bytes(setup: Setup) -> int:
    """Logits and cross-entropy at the start of the backward pass.

    plain: fp32 logits, log-softmax and their gradient, 12 B x T x V (transformers, loss/loss_utils.py
    upcasts to fp32; a trace of torchtune's plain loss gives the same).
    chunked (torchtune), eager: the logits in the model's type and the fp32 log-softmax of every chunk stay,
    and one chunk has two more fp32 copies: (2 + 4) B x T x V + 8 B x T x V / chunks; compiled, without the
    log-softmax. torchtune measured 8.1 GiB less for 8,192 tokens of Llama 3.2 3B than with the plain one.
    recomputed (DeepSpeed, launchers/engines/deepspeed_batches.py): logits, their gradient in pieces and
    joined, all in the model's type, and 12 B for each logit of one piece.
    """
    size = 4 if setup.precision == "fp32" else 2
    elements = setup.micro_batch * setup.seq_len * setup.model.vocab
    if setup.loss == "plain":
        return 12 * elements
    if setup.loss == "recomputed":
        return 3 * size * elements + 12 * min(elements, DEEPSPEED_LOSS_POSITIONS * setup.model.vocab)
    kept = size if setup.compile else size + 4
    return kept * elements + 8 * elements // LOSS_CHUNKS


def communication_bytes(setup: Setup) -> int:
    """Buffers that gather weights and reduce gradients.

    FSDP2 holds two blocks gathered (one computing, one prefetched), the inputs of two reduce-scatters, and
    the root group (embedding, output head, last norm) whole from the forward to the end of the backward
    pass: Zhao et al. 2023 (arXiv:2304.11277), section 3.3; torch.distributed.fsdp.fully_shard, which never
    reshards the root. DeepSpeed: its buckets, twice when communication overlaps; stage 3: live parameters
    and prefetch on top (https://www.deepspeed.ai/docs/config-json/).
    """
    model, stage = setup.model, setup.zero_stage
    if setup.world_size == 1 and not stage:
        return 0
    size = 4 if setup.precision == "fp32" else 2
    trainable = setup.trainable_parameters
    if stage is not None:
        bucket = size * min(DEEPSPEED_BUCKET, trainable)
        if stage == 0:
            return bucket
        if stage < 3:
            return bucket * (3 if setup.device == "cuda" else 2)  # reduce (double when overlapped), gather
        live = min(ZERO3_LIVE_PARAMETERS + ZERO3_PREFETCH, model.parameters)
        return bucket * (2 if setup.device == "cuda" else 1) + size * live
    if setup.sharding != "fsdp":
        return 0
    if setup.quantization != "none":
        linear = model.attention_linear_parameters + model.mlp_linear_parameters
        block = int(linear * (NF4_WEIGHT_BYTES + NF4_SCALE_BYTES))
        block += size * (model.layer_parameters - linear)
    else:
        block = size * model.layer_parameters
    root = size * (model.embedding_parameters + model.hidden)
    reduce_size = 4 if setup.precision == "bf16-mixed" else size
    reduced = 2 * reduce_size * _share(trainable, model.layers) if setup.adapters else 0
    if not setup.adapters:
        reduced = 2 * reduce_size * model.layer_parameters
    return 2 * block + reduced + root


def optimizer_temporary_bytes(setup: Setup) -> int:
    """What the optimizer's step allocates for a moment.

    The fused AdamW of GPUs: nothing. Tensor by tensor, on a CPU: about two copies of the largest tensor
    (torch.optim.adamw, _single_tensor_adamw). DeepSpeed: the fp32 gradients of its partition, in sub-groups
    at stage 3 (runtime/zero/stage_1_and_2.py and stage3.py, step).
    """
    stage = setup.zero_stage
    shards = setup.world_size if setup.sharding not in ("none", "ddp", "zero0") else 1
    if stage is not None:
        if _offloaded(setup):
            return 0
        own = _share(setup.trainable_parameters, shards)
        return 4 * (min(own, ZERO3_SUB_GROUP) if stage == 3 else own)
    if setup.device == "cuda":
        return 0
    largest = max(setup.model.vocab * setup.model.hidden, setup.model.ffn * setup.model.hidden)
    if setup.adapters:
        largest = setup.lora_rank * max(setup.model.ffn, setup.model.hidden, setup.model.q_dim)
    return 2 * (4 if setup.precision == "fp32" else 2) * _share(largest, shards)


def nf4_bytes(setup: Setup) -> int:
    """Scales of the 4-bit weights, and the largest linear layer dequantised for its product."""
    if setup.quantization == "none":
        return 0
    model = setup.model
    shards = setup.world_size if setup.sharding in ("fsdp", "zero3") else 1
    scales = _share(int(model.linear_parameters * NF4_SCALE_BYTES), shards)
    largest = max(rows * columns for rows, columns in model.linear_shapes.values())
    return scales + (4 if setup.precision == "fp32" else 2) * largest


def host_bytes(setup: Setup) -> int:
    """Memory of one node of a job that trains on GPUs.

    Each process: Python, torch and CUDA's host side. Loading: torchtune maps the safetensors files, whose
    pages all ranks share, and permutes copies of the query and key weights in each; transformers maps them
    as well and loads straight onto the GPU, but with ZeRO-3 each rank holds one file of up to 5 GB.
    Saving: the first rank gathers the model on the host and converts it. Offload: DeepSpeed's own rule,
    16 B a trained parameter over the nodes, times 1.5 (runtime/zero/stage_1_and_2.py,
    estimate_zero2_model_states_mem_needs).
    """
    model, ranks = setup.model, setup.processes_per_node
    whole = 2 * model.parameters
    base = ranks * GPU_PROCESS_HOST_BYTES
    if setup.engine == "torchtune":
        permuted = 2 * model.layers * model.hidden * (model.q_dim + model.kv_dim)
        loading = whole + ranks * permuted
    elif setup.sharding == "zero3":
        loading = whole + ranks * min(whole, 5 * 10**9)
    else:
        loading = whole
    saving = 2 * whole
    offloaded = 0
    if _offloaded(setup):
        offloaded = int(1.5 * _share(16 * setup.trainable_parameters, setup.nodes))
    return base + max(loading, saving) + offloaded


# Resident memory of a Python process with torch, CUDA's libraries and an engine loaded: 2-3 GiB. Recalled,
# to be replaced by a measurement.
GPU_PROCESS_HOST_BYTES = 3 * GIB


def disk_bytes(setup: Setup) -> int:
    """Room that one node needs: the weights, the kept checkpoints (and one being written), the result."""
    whole = 2 * setup.model.parameters
    parts = dict(states(setup))
    per_rank = sum(parts.get(name, 0) for name in ("master weights", "optimizer", "adapters"))
    if not setup.adapters:
        per_rank += parts["weights"]
    if _offloaded(setup):
        per_rank += _share(12 * setup.trainable_parameters, setup.world_size)
    checkpoint = per_rank * setup.world_size  # on resuming, every node holds all ranks' parts
    return 2 * whole + (setup.keep_checkpoints + 1) * checkpoint + GIB


def active(setup: Setup) -> dict[str, int]:
    """The categories at the moment of the peak, without runtime and fragmentation."""
    model = setup.model
    tokens = setup.micro_batch * setup.seq_len
    size = 4 if setup.precision == "fp32" else 2
    always = dict(states(setup))
    gradients = always.pop("gradients")
    always["NF4 overhead"] = nf4_bytes(setup)
    gathered = communication_bytes(setup)
    logits = loss_bytes(setup)

    block = tokens * layer_activation_bytes(setup)
    boundary = tokens * size * model.hidden
    ends = 4 * boundary  # the last norm: input, fp32 copy, output
    if setup.fixed_length:
        ends += setup.micro_batch * setup.seq_len**2  # the mask that keeps samples apart
    if setup.checkpointing != "none":
        forward, deepest = model.layers * boundary + ends, model.layers * boundary + block
    else:
        forward = deepest = model.layers * block + ends
    # Gradients live from the first backward pass to the optimizer's step; DeepSpeed's are flat buffers
    held = gradients if setup.accumulation > 1 or setup.zero_stage is not None else 0

    moments: list[dict[str, int]] = [
        {
            "activations": forward,
            "logits and loss": logits,
            "gradients": held,
            "communication buffers": gathered,
        },
        {"activations": deepest, "gradients": held, "communication buffers": gathered},
        {
            "activations": boundary + block,
            "gradients": gradients,
            "communication buffers": gathered,
        },
        {"gradients": gradients, "optimizer temporaries": optimizer_temporary_bytes(setup)},
    ]
    peak = max(moments, key=lambda moment: sum(moment.values()))
    return {name: value for name, value in (always | peak).items() if value}


def _share(total: int, among: int) -> int:
    """One process's part, rounded up."""
    return -(-total // among)
