"""Memory and disk of one node: host RAM for loading, resuming and offload, and room for checkpoints."""

from __future__ import annotations

from estimator.memory.states import offloads_gradients, offloads_states, offloads_weights, share, states
from estimator.plan import GIB
from estimator.setup import Setup

# CUDA context of one process 0.47-0.92 GiB, and 1.5 GiB more at NCCL's first collective: measured on A100s
# in stas00/ml-engineering, training/performance. Outside PyTorch's allocator.
CUDA_CONTEXT_BYTES = int(0.75 * GIB)
NCCL_BYTES = int(1.5 * GIB)

# Python, torch and an engine, imported, in one process without a GPU: resident 0.43 to 0.46 GiB with
# DeepSpeed; with torchtune 0.09 GiB less, as its ranks leave out `datasets`, pandas and pyarrow
# (launchers/engines/torchtune/deferred.py); 0.1 more with a process group (torch 2.13+cpu, torchtune 0.6.1,
# DeepSpeed 0.19.8, Linux).
CPU_RUNTIME_BYTES = int(0.45 * GIB)
CPU_RUNTIME_OF_TORCHTUNE_BYTES = int(0.36 * GIB)
GLOO_BYTES = int(0.1 * GIB)

# Resident memory of a Python process with torch, CUDA's libraries and an engine loaded: 2-3 GiB. Recalled,
# to be replaced by a measurement.
GPU_PROCESS_HOST_BYTES = 3 * GIB


def runtime_bytes(setup: Setup) -> int:
    """Memory of one process that holds no tensor yet: CUDA's context and NCCL, or on a CPU Python and torch.

    It lies outside PyTorch's allocator.
    """
    if setup.device == "cpu":
        runtime = CPU_RUNTIME_OF_TORCHTUNE_BYTES if setup.engine == "torchtune" else CPU_RUNTIME_BYTES
        return runtime + (GLOO_BYTES if setup.world_size > 1 else 0)
    return CUDA_CONTEXT_BYTES + (NCCL_BYTES if setup.world_size > 1 else 0)


def host_bytes(setup: Setup) -> int:
    """Host memory in bytes of one node of a job that trains on GPUs.

    Each process: Python, torch and CUDA's host side. Loading: torchtune maps the safetensors files, whose
    pages all ranks share, and permutes copies of the query and key weights in each; transformers maps them as
    well and loads straight onto the GPU, but with ZeRO-3 each rank holds one file of up to 5 GB. Saving: the
    first rank gathers the model on the host and converts it. Offload of states: DeepSpeed's own rule, 16 B a
    trained parameter over the nodes, times 1.5 (runtime/zero/stage_1_and_2.py,
    estimate_zero2_model_states_mem_needs); on NVMe, the buffers of one sub-group alone. Offload of
    activations: every block's input.
    """
    model, ranks = setup.model, min(setup.processes_per_node, setup.world_size)
    weights = 2 * model.parameters
    base = ranks * GPU_PROCESS_HOST_BYTES
    if setup.engine == "torchtune":
        permuted = 2 * model.layers * model.hidden * (model.q_dim + model.kv_dim)
        loading = weights + ranks * permuted
    elif setup.sharding == "zero3":
        loading = weights + ranks * min(weights, 5 * 10**9)
    else:
        loading = weights
    saving = 2 * weights
    return base + max(loading, saving) + _offloaded_bytes(setup, ranks)


def _offloaded_bytes(setup: Setup, ranks: int) -> int:
    offloaded = 0
    if offloads_states(setup):
        bytes_each = 16 if offloads_gradients(setup) else 12
        bytes_each = bytes_each if setup.offload_to == "cpu" else 4  # gradients and a sub-group in passing
        offloaded += int(1.5 * share(bytes_each * setup.trainable_parameters, setup.nodes))
    if offloads_weights(setup) and setup.offload_to == "cpu":
        offloaded += share(2 * setup.model.parameters, setup.nodes)
    if setup.activation_offload:
        offloaded += ranks * setup.tokens * 2 * setup.model.hidden * setup.model.layers
    return offloaded


def shared_memory_bytes(setup: Setup) -> int:
    """Shared memory (/dev/shm) in bytes of one node: 1 GiB for each process.

    For NCCL's rings and a data loader's batches (NCCL's shared memory transport takes some 10 MiB a channel
    and peer; PyTorch's documentation asks for --ipc=host).
    """
    return min(setup.processes_per_node, setup.world_size) * GIB


def disk_bytes(setup: Setup) -> int:
    """Disk in bytes that one node needs: weights, kept checkpoints and one being written, the result."""
    weights = 2 * setup.model.parameters
    parts = states(setup)
    names = ("master weights", "optimizer", "adapters")
    per_rank = sum(parts.get(name, 0) for name in names)
    if not setup.adapters:
        per_rank += parts["weights"]
    if offloads_states(setup):
        per_rank += share(12 * setup.trainable_parameters, setup.world_size)
    checkpoint = per_rank * setup.world_size  # on resuming, every node holds all ranks' parts
    nvme = share(16 * setup.trainable_parameters, setup.nodes) if setup.offload_to == "nvme" else 0
    return 2 * weights + (setup.keep_checkpoints + 1) * checkpoint + nvme * offloads_states(setup) + GIB
