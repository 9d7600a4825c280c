"""Memory and disk of one node: host RAM for loading, resuming and offload, and room for checkpoints."""

from __future__ import annotations

import math

from estimator.memory.shape import part_of, stages
from estimator.memory.states import (
    offloads_gradients,
    offloads_states,
    offloads_weights,
    packed_bytes,
    share,
    states,
)
from estimator.plan import GIB
from estimator.setup import Setup
from estimator.vocabulary import LAUNCHED_ENGINES, TASKS

# CUDA context of one process 0.47-0.92 GiB, and 1.5 GiB more at NCCL's first collective: measured on A100s
# in stas00/ml-engineering, training/performance. Outside PyTorch's allocator.
CUDA_CONTEXT_BYTES = int(0.75 * GIB)
NCCL_BYTES = int(1.5 * GIB)
# The loop has a process group in one process, too: on an H200 (torch 2.11, NCCL 2.28.9) 1.30 and 1.68 GiB lay
# outside of the allocator, where torchtune, which has none then, left 0.73
# (benchmarks/results/on_gpu_1x_nvidia_h200.md, on_gpu_1x_nvidia_h200_fsdp2.md)
NCCL_ALONE_BYTES = {"fsdp2": int(0.57 * GIB), "deepspeed": int(0.95 * GIB)}

# Python, torch and an engine, imported, in one process without a GPU: resident 0.43 to 0.46 GiB with
# DeepSpeed; with torchtune 0.09 GiB less, because its ranks do not import `datasets`, pandas and pyarrow;
# 0.1 more with a process group (torch 2.13+cpu, torchtune 0.6.1,
# DeepSpeed 0.19.8, Linux).
CPU_RUNTIME_BYTES = int(0.45 * GIB)
CPU_RUNTIME_OF_TORCHTUNE_BYTES = int(0.36 * GIB)
# With FSDP2 on a UNet, whose diffusers imports more: tiny-sdxl's runs show 0.52 to 0.54 (diffusers 0.42.1)
CPU_RUNTIME_OF_IMAGES_BYTES = int(0.5 * GIB)
GLOO_BYTES = int(0.1 * GIB)

# Resident memory of a Python process with torch, CUDA's libraries and an engine loaded: 2-3 GiB. Recalled,
# to be replaced by a measurement.
GPU_PROCESS_HOST_BYTES = 3 * GIB


def runtime_bytes(setup: Setup) -> int:
    """Return the memory of one process without tensors: CUDA context and NCCL, or Python and torch on a CPU.

    This memory is outside PyTorch's allocator.
    """
    if setup.device == "cpu":
        runtime = CPU_RUNTIME_OF_TORCHTUNE_BYTES if setup.engine == "torchtune" else CPU_RUNTIME_BYTES
        if TASKS[setup.task].images:
            runtime = CPU_RUNTIME_OF_IMAGES_BYTES
        return runtime + (GLOO_BYTES if setup.world_size > 1 else 0)
    return CUDA_CONTEXT_BYTES + (NCCL_BYTES if setup.world_size > 1 else nccl_alone_bytes(setup))


def nccl_alone_bytes(setup: Setup) -> int:
    """Return NCCL's bytes in a single process, for engines that create a process group for it."""
    return NCCL_ALONE_BYTES.get(setup.engine, 0)


def host_bytes(setup: Setup) -> int:
    """Return the host memory in bytes of one node of a job that trains on GPUs.

    Per process: Python, torch and the host side of CUDA. Per node: the larger of loading and saving, which
    never overlap. Mapped files do not count, as the kernel can reclaim their pages. Offload of states:
    DeepSpeed's own rule, 16 B per trained parameter over the nodes, times 1.5
    (runtime/zero/stage_1_and_2.py, estimate_zero2_model_states_mem_needs); on NVMe, only the
    buffers of one sub-group. Offload of activations: the inputs of all blocks.
    """
    ranks = min(setup.processes_per_node, setup.world_size)
    loading, saving = _loading_bytes(setup, ranks), _saving_bytes(setup)
    return ranks * GPU_PROCESS_HOST_BYTES + max(loading, saving) + _offloaded_bytes(setup, ranks)


def _loading_bytes(setup: Setup, ranks: int) -> int:
    """Return the host memory in bytes of a node's ``ranks`` processes while loading, without mapped files.

    torchtune maps the safetensors files in each rank and permutes copies of the query and key weights
    (models/convert_weights.py; not for Qwen 2). In several processes it also casts the whole model where it
    trains in another type than the files' 16 bits, if no weight is 4-bit (training/_distributed.py,
    load_from_full_model_state_dict). transformers also maps them and moves one tensor at a time to the GPU.
    With ZeRO-3 only the first rank of a node reads the weights, and it merges experts on the host
    (measured, two processes on CPUs, transformers 5.4, DeepSpeed 0.19.8: a dense model only
    needs its shards, a mixture of experts one copy of the model in rank 0). With FSDP2 the first rank holds a
    quantized base there, quantized on its GPU one matrix at a time, until it is distributed.
    """
    model = setup.model
    if setup.engine == "torchtune":
        permuted = (
            0 if model.family == "qwen2" else model.layers * model.hidden * (model.q_dim + model.kv_dim)
        )
        cast = setup.precision == "fp32" and setup.world_size > 1 and setup.quantization == "none"
        return ranks * (2 * permuted + 4 * model.parameters * cast)
    if setup.engine == "fsdp2" and setup.quantization != "none":
        return sum(packed_bytes(setup, part_of(setup, stage)) for stage in stages(setup))
    if setup.sharding == "zero3":
        return 2 * model.parameters if model.experts > 1 else 0
    return 0


def _saving_bytes(setup: Setup) -> int:
    """Return the host memory while saving the result, in bytes.

    Complete models are gathered and converted by the first rank. Adapters are merged tensor by tensor
    (launchers/engines/_merge.py): the adapter and three copies of the largest matrix (base, merged, and in
    Hugging Face's row order).
    """
    if not (setup.adapters and setup.engine in LAUNCHED_ENGINES):
        return 4 * setup.model.parameters
    bytes_each = 4 if setup.precision == "fp32" else 2
    if setup.adapter_only:
        return bytes_each * setup.trainable_parameters
    matrices = [setup.model.vocab * setup.model.hidden]
    matrices += [rows * columns for rows, columns in setup.model.linear_shapes.values()]
    return bytes_each * (setup.trainable_parameters + 3 * max(matrices))


def _offloaded_bytes(setup: Setup, ranks: int) -> int:
    offloaded = 0
    if offloads_states(setup):
        bytes_each = 16 if offloads_gradients(setup) else 12
        bytes_each = bytes_each if setup.offload_to == "cpu" else 4  # buffers for gradients and one sub-group
        offloaded += int(1.5 * share(bytes_each * setup.trainable_parameters, setup.nodes))
    if offloads_weights(setup) and setup.offload_to == "cpu":
        offloaded += share(2 * setup.model.parameters, setup.nodes)
    if setup.activation_offload:
        offloaded += ranks * setup.tokens * 2 * setup.model.hidden * setup.model.layers
    return offloaded


def shared_memory_bytes(setup: Setup) -> int:
    """Return the shared memory (/dev/shm) in bytes of one node: 1 GiB per process.

    For NCCL's rings and the batches of data loaders (NCCL's shared memory transport takes about 10 MiB per
    channel and peer; PyTorch's documentation asks for --ipc=host).
    """
    return min(setup.processes_per_node, setup.world_size) * GIB


def checkpoint_bytes(setup: Setup) -> int:
    """Return the bytes of one checkpoint over all nodes: trained parameters and optimizer states."""
    parts = states(setup)
    names = ("master weights", "optimizer", "adapters")
    per_rank = sum(parts.get(name, 0) for name in names)
    if not setup.adapters:
        per_rank += parts["weights"]
    if offloads_states(setup):
        per_rank += share(12 * setup.trainable_parameters, setup.world_size)
    return per_rank * setup.world_size


def disk_bytes(setup: Setup, *, keeps_checkpoints: bool = True) -> int:
    """Return the disk space in bytes that one node needs: weights, checkpoints, the result.

    The result is a model of the weights' size, or only an adapter, in fp32 at most. ``keeps_checkpoints``:
    whether checkpoints stay on this disk, in addition to one that is being written. Otherwise they are
    uploaded (launchers/gang/uploads.py): a node holds its part of the checkpoint being written, its part of
    the one being uploaded, and all parts of the one that training resumed from.
    """
    weights = 2 * setup.model.stored_parameters
    checkpoint = checkpoint_bytes(setup)  # on resuming, every node holds all ranks' parts
    checkpoints = setup.keep_checkpoints + 1 if keeps_checkpoints else 1 + 2 / setup.nodes
    nvme = share(16 * setup.trainable_parameters, setup.nodes) if setup.offload_to == "nvme" else 0
    result = 4 * setup.trainable_parameters if setup.adapter_only else weights
    return weights + result + math.ceil(checkpoints * checkpoint) + nvme * offloads_states(setup) + GIB
