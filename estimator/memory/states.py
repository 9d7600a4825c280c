"""Persistent memory of a process: weights, master weights, gradients, optimizer states."""

from __future__ import annotations

from estimator.memory import implementations, vision
from estimator.memory.shape import Part, adapter_parameters, part_of, shape_of, stages
from estimator.models import parameters
from estimator.setup import Setup
from estimator.vocabulary import ENGINES, OPTIMIZERS, SHARDINGS

VISION = "vision tower"
COPY_BYTES = 2  # of a trained weight's 16-bit copy (launchers/engines/fsdp2/master_weights.py)

# NF4: 4 bits a weight and a scale for each block of 64 weights, in fp32, or in 8 bits with an fp32 scale for
# each 256 of those where they are quantized again. Dettmers et al. 2023, QLoRA (arXiv:2305.14314), section 3.
NF4_WEIGHT_BYTES = 0.5
NF4_PLAIN_SCALE_BYTES = 4 / 64
NF4_SCALE_BYTES = 1 / 64 + 4 / (64 * 256)
INT8_SCALE_BYTES = 4

# MS-AMP's levels as Accelerate tabulates them (docs/source/usage_guides/low_precision_training.md): bytes of
# weight, master weight, gradient, optimizer states.
MSAMP = {"msamp-o1": (2, 0, 1, 8), "msamp-o2": (2, 0, 1, 3), "msamp-o3": (1, 2, 1, 3)}


def states(setup: Setup, stage: str | None = None) -> dict[str, int]:
    """Return the bytes by category of one process; by default of the largest pipeline stage.

    torchtune and litgpt train in the weights' own type and keep both AdamW moments in it: 2 + 2 + 4 B a
    parameter in bf16. fp32 weights under FSDP2 or autocast: 4 + 4 + 8. DeepSpeed with bf16 keeps an fp32 copy
    and fp32 moments: 2 + 2 + 4 + 8; Megatron-Core fp32 gradients as well: 2 + 4 + 4 + 8. What ZeRO's stages
    and FSDP divide: Rajbhandari et al. 2020 (arXiv:1910.02054), section 3.1; Zhao et al. 2023
    (arXiv:2304.11277). Adapters: the base has neither gradients nor states (Hu et al. 2021,
    arXiv:2106.09685, section 4.2), except in FSDP1's flat parameters: :func:`gradient_bytes`.
    """
    if stage is None:
        stage_states = [states(setup, name) for name in stages(setup)]
        return max(stage_states, key=lambda sizes: sum(sizes.values()))
    part = part_of(setup, stage)
    weight, master, moments = state_bytes(setup)
    trained = trained_parameters(setup, part)
    result = {"weights": 0, "master weights": 0, "reference model": 0, "reward model": 0, "adapters": 0}
    result["reward model"] = setup.answers.reward_parameters * compute_size(setup)  # whole in each process
    base = base_bytes(setup, part, weight)
    if not offloads_weights(setup):
        is_undivided = setup.undivided_base and setup.zero_stage == 3
        result["weights"] = base if is_undivided else process_share(setup, part, base, "weights")
        if not divides_scales(setup):
            result["weights"] += scale_bytes(setup, part)
        copies = COPY_BYTES * trained if setup.copies_weights else 0
        if setup.adapters:
            result["adapters"] = share(trained * adapter_size(setup), divisor(setup, "weights")) + copies
        else:
            result["weights"] += copies
        if setup.reference == "copy":
            copy = part.parameters * compute_size(setup)
            result["reference model"] = process_share(setup, part, copy, "weights")
    result["gradients"] = 0 if offloads_gradients(setup) else gradient_bytes(setup, part)
    if part.first:
        result[VISION] = _vision_bytes(setup, part)
    if not offloads_states(setup):
        result["master weights"] = process_share(setup, part, trained * master, "optimizer")
        result["optimizer"] = process_share(setup, part, int(trained * moments), "optimizer")
    else:
        result["optimizer"] = 0
    return result


def _vision_bytes(setup: Setup, part: Part) -> int:
    """Return the bytes of vision tower and projector: weights, gradients, optimizer states, activations."""
    weight, master, moments = state_bytes(setup)
    trained = vision.trained_parameters(setup)
    frozen = vision.parameters(setup) - (0 if setup.adapters else trained)
    weights = frozen * (_frozen_size(setup) if setup.adapters else weight) + trained * weight
    states_bytes = process_share(setup, part, weights, "weights")
    states_bytes += process_share(setup, part, trained * weight, "gradients")
    states_bytes += process_share(setup, part, int(trained * (master + moments)), "optimizer")
    return states_bytes + vision.activation_bytes(setup, compute_size(setup))


def loaded_bytes(setup: Setup, part: Part) -> int:
    """Return the bytes of weights and scales in one process after loading, before they are sharded.

    transformers leaves a quantized model out of ZeRO-3's partitioned construction (integrations/deepspeed.py
    and modeling_utils.py, is_deepspeed_zero3_enabled and not is_quantized), so every process has all of it on
    its GPU until deepspeed.initialize shards it. 0 if loading needs no more than the shard.
    """
    if setup.zero_stage != 3 or setup.quantization == "none" or offloads_weights(setup):
        return 0
    return base_bytes(setup, part, state_bytes(setup)[0]) + scale_bytes(setup, part)


def compute_size(setup: Setup) -> int:
    """Return the bytes per element of inputs and results of matrix products (the compute type)."""
    return 4 if setup.precision == "fp32" else 2


def adapter_size(setup: Setup) -> int:
    """Return the bytes of one adapter weight; prompts have the type of the base, even with fp32 LoRA."""
    size = 0 if setup.prompts else implementations.of(setup).adapter_bytes
    return size or _weight_size(setup)


def _weight_size(setup: Setup) -> int:
    if setup.precision == "bf16" or ENGINES[setup.engine].master_copies:
        return 4 if setup.precision == "fp32" else 2
    return 4


def _frozen_size(setup: Setup) -> int:
    """Return the bytes of one frozen weight; the FSDP2 loop keeps fp32 for adapters only."""
    return compute_size(setup) if setup.engine == "fsdp2" else _weight_size(setup)


def state_bytes(setup: Setup) -> tuple[int, int, float]:
    """Return the bytes per trained parameter of weight, master weight and optimizer states."""
    weight = adapter_size(setup) if setup.adapters else _weight_size(setup)
    if setup.fp8 in MSAMP and not setup.adapters:
        level = MSAMP[setup.fp8]
        return level[0], level[1], float(level[3])
    copied = ENGINES[setup.engine].master_copies and not (
        setup.precision == "fp32" and setup.zero_stage in (0, None)
    )
    moment_size = 4 if copied else weight
    return weight, 4 if copied else 0, _moments(setup, moment_size)


def _moments(setup: Setup, size: int) -> float:
    """Return the bytes of optimizer states per parameter; ``size``: bytes of an unquantized element.

    Paged states count as 0: they are in managed memory, which moves to the host if the GPU is full
    (bitsandbytes, functional.get_paged). litgpt uses them with a quantized base (litgpt/utils.py,
    instantiate_bnb_optimizer). Adafactor: a row and a column for each matrix (Shazeer and Stern 2018,
    arXiv:1804.04235, section 4). Muon: one moment for matrices, AdamW for the rest (Keller Jordan 2024).
    """
    optimizer = OPTIMIZERS[setup.optimizer]
    if optimizer.paged or (setup.engine == "litgpt" and setup.quantization != "none"):
        return 0.0
    if optimizer.factored:
        return 2 * 4 / setup.model.hidden
    if optimizer.orthogonalized:
        outside = 0.0 if setup.adapters else setup.model.embedding_parameters / setup.model.parameters
        return (1 + outside) * size
    return optimizer.state_bytes or float(optimizer.moments * size)


def trained_parameters(setup: Setup, part: Part) -> int:
    """Count the trained parameters of one rank, before data parallel sharding."""
    if not setup.adapters:
        return part.parameters
    inner = (adapter_parameters(setup) + setup.trained_norm_parameters) * part.layers // setup.model.layers
    # tensor parallelism divides one of the two matrices of an adapter
    divided = -(-inner * (setup.tensor + 1) // (2 * setup.tensor))
    outer = setup.trained_module_parameters if part.first or part.last else 0
    return divided + -(-outer // setup.tensor)


def base_bytes(setup: Setup, part: Part, weight: int) -> int:
    """Return the bytes of the base model's weights in one rank, before data parallel sharding.

    Excludes norms trained together with adapters, which count as adapters.
    """
    frozen_parameters = part.parameters - setup.trained_norm_parameters * part.layers // setup.model.layers
    if setup.quantization == "none":
        return frozen_parameters * (weight if not setup.adapters else _frozen_size(setup))
    size = 4 if setup.upcast_frozen else _frozen_size(setup)
    unquantized = frozen_parameters - _quantized(setup, part)
    total = packed_bytes(setup, part) + unquantized * size
    if setup.engine == "litgpt":
        # finetune/lora.py replaces the embedding by bitsandbytes' StableEmbedding; the old one stays
        # referenced. Runs before that (2023-10) hold as much, for an unknown reason.
        total += part.embedding * size
    return total


def packed_bytes(setup: Setup, part: Part) -> int:
    """Return the bytes of quantized weights of a part without scales, before sharding."""
    bytes_each = 1.0 if setup.quantization == "int8" else NF4_WEIGHT_BYTES
    return int(_quantized(setup, part) * bytes_each)


def _quantized(setup: Setup, part: Part) -> int:
    """Count the weights of a part that are quantized; Lightning's plugin replaces every linear layer."""
    return part.blocks_linear + (part.untied_head if setup.engine == "litgpt" else 0)


def scale_bytes(setup: Setup, part: Part) -> int:
    """Return the bytes of the scales of quantized weights in one process.

    torchtune's scales are part of the weight (torchao, NF4Tensor) and sharded with it. The loop stores them
    next to it (launchers/engines/loop/quantized.py), unsharded; its int8 has one fp32 scale per row.
    """
    if setup.quantization == "none":
        return 0
    if setup.quantization == "int8":
        rows = _linear_rows(setup) if setup.runs_loop else 0
        return INT8_SCALE_BYTES * rows * part.layers // setup.model.layers
    scale_size = NF4_SCALE_BYTES if setup.quantization == "nf4-double" else NF4_PLAIN_SCALE_BYTES
    return share(
        int(_quantized(setup, part) * scale_size), divisor(setup, "weights") if divides_scales(setup) else 1
    )


def divides_scales(setup: Setup) -> bool:
    """Return whether the scales of quantized weights are divided and gathered with them."""
    return not setup.runs_loop


def _linear_rows(setup: Setup) -> int:
    """Count the output features of all linear layers of the blocks."""
    model = setup.model
    return sum(parameters.magnitudes(model, (name,)) for name in model.projections)


def gradient_bytes(setup: Setup, part: Part) -> int:
    """Return the bytes of gradients that one process holds at the end of its last backward pass.

    FSDP1 puts a block's weights in one flat parameter: if any of them is trained, all of it has a gradient,
    which stays unsharded without synchronization (torch/distributed/fsdp/_flat_param.py; Fabric's
    no_backward_sync skips the synchronization of all but the last micro batch). FSDP2 in a pipeline keeps
    unreduced fp32 gradients over the micro batches
    (torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py).
    """
    size = gradient_size(setup)
    trained = trained_parameters(setup, part)
    if setup.optimizer_in_backward:
        return 0
    if has_flat_gradients(setup):
        flat_elements = part.blocks if setup.adapters else part.parameters
        return flat_elements * size if setup.accumulation > 1 else share(flat_elements * size, setup.shard)
    total = process_share(setup, part, trained * size, "gradients")
    if reduces_once(setup):
        total = trained * size
    total += unreduced_embedding_gradient_bytes(setup, part)
    if keeps_embedding_gradient(setup):
        total += part.embedding * size
    if accumulates_unreduced(setup):
        total += 4 * trained
    return total


def keeps_embedding_gradient(setup: Setup) -> bool:
    """Return whether a frozen embedding gets gradients that are neither used nor freed.

    litgpt's StableEmbedding does, with a quantized base, since Lightning-AI/litgpt@ae798aba (October 2024).
    """
    return setup.engine == "litgpt" and setup.quantization != "none" and setup.engine_version != "2023-10"


def late_gradient_bytes(setup: Setup, part: Part) -> int:
    """Return the bytes of gradients that do not exist yet at the peak of the first block's backward pass.

    At that peak only one matrix of the block has its gradient. The other gradients of the block come later,
    and that of the embedding, unless it is tied to the head, whose gradient is the first.
    """
    if setup.adapters or setup.optimizer_in_backward:
        return 0
    size = gradient_size(setup)
    matrix = min(shape_of(setup.model).largest_linear // setup.tensor, part.block)
    late = process_share(setup, part, (part.block - matrix) * size, "gradients")
    if setup.model.tied_embeddings:
        return late
    embedding = process_share(setup, part, part.embedding * size, "gradients")
    return late + embedding + unreduced_embedding_gradient_bytes(setup, part)


def unreduced_embedding_gradient_bytes(setup: Setup, part: Part) -> int:
    """Return the bytes by which the unreduced gradient of a row-sharded embedding exceeds its shard.

    Only torchtune with tensor parallelism (models/llama3/_parallelism.py): DTensor keeps a partial sum for
    all rows on each rank until the optimizer step. FSDP reduces it at once, so there is none.
    """
    if setup.engine != "torchtune" or setup.tensor == 1 or divisor(setup, "gradients") > 1:
        return 0
    if setup.adapters or setup.optimizer_in_backward:
        return 0
    return (setup.tensor - 1) * part.embedding * gradient_size(setup)


def accumulates_unreduced(setup: Setup) -> bool:
    """Return whether FSDP accumulates unreduced gradients over a pipeline's micro batches."""
    accumulates = setup.pipeline > 1 and setup.accumulation > 1
    return accumulates and SHARDINGS[setup.sharding].fsdp and setup.shard > 1


def reduces_once(setup: Setup) -> bool:
    """Return whether gradients stay unsharded until a step's last micro batch: those of adapters under FSDP2.

    launchers/engines/fsdp2/sharding.py, FsdpModel.backward; launchers/engines/torchtune/recipe.py.
    """
    sharded = SHARDINGS[setup.sharding].fsdp and setup.shard > 1
    return sharded and setup.adapters and setup.accumulation > 1 and setup.engine in ("fsdp2", "torchtune")


def has_flat_gradients(setup: Setup) -> bool:
    """Return whether FSDP1's flat parameters hold this engine's gradients."""
    return fsdp1(setup) and implementations.of(setup).flat_gradients


def fsdp1(setup: Setup) -> bool:
    """Return whether FSDP1 divides the states."""
    wraps = SHARDINGS[setup.sharding].fsdp and setup.shard > 1
    return wraps and (setup.flat_parameters or implementations.of(setup).flat_gradients)


def gradient_size(setup: Setup) -> int:
    """Return the bytes per element of stored gradients."""
    if setup.adapters:
        return adapter_size(setup)
    if setup.fp8 in MSAMP:
        return MSAMP[setup.fp8][2]
    if setup.engine == "megatron":
        return 4  # Megatron-Core accumulates in fp32
    return _weight_size(setup)


def divisor(setup: Setup, state: str) -> int:
    """Return the number of processes that share "weights", "gradients" or "optimizer"."""
    return setup.shard if getattr(SHARDINGS[setup.sharding], state) else 1


def process_share(setup: Setup, part: Part, total: int, state: str) -> int:
    """Return one process's share of ``total`` bytes of "weights", "gradients" or "optimizer" of a stage.

    The bytes are spread evenly over the stage's weights. Processes that hold different experts only share the
    other weights (DeepSpeed-MoE, arXiv:2201.05596, section 5.1; also torchtitan and Megatron-Core).
    """
    parts = divisor(setup, state)
    trained_adapters = setup.adapters and state != "weights"  # small: divided over all processes
    if trained_adapters or part.expert_ways >= parts or not part.experts:
        return share(total, parts)
    experts = total * part.experts // part.parameters
    return share(total - experts, parts) + share(experts, part.expert_ways)


def offloads_states(setup: Setup) -> bool:
    """Return whether the optimizer's states are in host memory or on a disk instead of a GPU."""
    return setup.offload != "none" and setup.device == "cuda" and setup.zero_stage != 0


def offloads_gradients(setup: Setup) -> bool:
    """Return whether gradients are in host memory: DeepSpeed with offloaded states, FSDP "all"."""
    return offloads_states(setup) and (setup.zero_stage is not None or setup.offload == "all")


def offloads_weights(setup: Setup) -> bool:
    """Return whether the weights are stored in host memory or on a disk instead of a GPU."""
    return offloads_states(setup) and setup.offload == "all" and setup.sharding in ("zero3", "fsdp")


def share(total: int, parts: int) -> int:
    """Return one of ``parts`` equal parts of ``total``, rounded up."""
    return -(-total // parts)
