"""torch's fully_shard (FSDP2) as the loop's sharding."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from estimator.engines import fp16
from estimator.vocabulary import TASKS
from launchers.base.imports import collector_paused
from launchers.engines import _merge
from launchers.engines.fsdp2 import checkpoint, kernels
from launchers.engines.fsdp2.master_weights import MasterWeights
from launchers.engines.gathering import gather_json
from launchers.engines.loop import generators, head, model, optimizer, quantized, quantized_model, unet
from launchers.engines.loop.families import blocks
from launchers.engines.loop.moving_average import MovingAverage
from launchers.gang.job import TrainJob
from launchers.gang.rank import RankEnv


class FullyShard:
    """Shards each block of the model over the ranks; see launchers.engines.loop.sharding.Sharding."""

    name = "fsdp2"

    def start(self, job: TrainJob, env: RankEnv) -> torch.device:
        cuda = job.plan.layout.device == "cuda"
        device = torch.device("cuda", env.local_rank) if cuda else torch.device("cpu")
        if cuda:
            torch.cuda.set_device(device)
        # The norm of gradients in host memory is reduced by gloo
        on_gpus = "cpu:gloo,cuda:nccl" if job.plan.layout.offload == "cpu" else "nccl"
        dist.init_process_group(on_gpus if cuda else "gloo", timeout=_merge.LIMIT)
        return device

    def load(self, job: TrainJob, env: RankEnv, device: torch.device) -> FsdpModel:
        generators.seed(job.settings.seed)
        network = _load(job, env, device)
        trained = [
            (name, parameter) for name, parameter in network.named_parameters() if parameter.requires_grad
        ]
        masters = (
            None
            if _uses_fully_shard(job) or not _is_mixed(job)
            else MasterWeights(network, model.dtype_of(job))
        )
        optimizers = optimizer.build(job, trained)
        decay = job.settings.images.ema_decay
        average = None if decay is None else MovingAverage(trained, decay, job.start_step)
        scaler = torch.amp.GradScaler(device.type, enabled=job.plan.layout.precision == fp16.PRECISION)
        if job.resume_dir is not None:
            checkpoint.restore(network, optimizers, average, scaler, job)
        generators.seed_rank(job, env)
        if job.resume_dir is not None:
            generators.restore(job.resume_dir, env)
        return FsdpModel(network, optimizers, average, masters, scaler, job, device)


class FsdpModel:
    """A model under fully_shard with torch's optimizer; see launchers.engines.loop.sharding.ShardedModel."""

    def __init__(
        self,
        network: nn.Module,
        optimizers: list[torch.optim.Optimizer],
        average: MovingAverage | None,
        masters: MasterWeights | None,
        scaler: torch.amp.GradScaler,
        job: TrainJob,
        device: torch.device,
    ) -> None:
        self.device = device
        self.module: Any = network
        self._optimizers, self._average, self._masters = optimizers, average, masters
        self._scaler = scaler  # disabled unless precision is fp16-mixed
        self._schedules = [
            optimizer.schedule(job, job.start_step)(torch_optimizer) for torch_optimizer in optimizers
        ]
        self._trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
        self._reduction_divisor = job.plan.layout.data_parallel  # the reduction of gradients divides by it
        self._copies = job.plan.layout.replicate
        self._clip = job.settings.clip_grad_norm
        # Gradients of adapters are small: they stay unsharded until the step's last micro batch
        self._reduces_once = (
            _uses_fully_shard(job) and job.plan.adapters and job.plan.layout.data_parallel > 1
        )

    def logits(self, **inputs: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.module(**inputs, use_cache=False).logits
        return logits

    def fused_loss(self, labels: torch.Tensor, **inputs: torch.Tensor) -> torch.Tensor:
        return head.loss(self.module, labels, inputs)

    def backward(self, loss: torch.Tensor, counted: int, *, last: bool) -> None:
        if self._reduces_once:
            self.module.set_requires_gradient_sync(last)
        elif self._copies > 1:  # gradients are sharded after each micro batch, and summed over copies once
            self.module.set_requires_all_reduce(last)
        scaled: Any = loss * (self._reduction_divisor / counted)
        self._scaler.scale(scaled).backward()

    def update(self) -> torch.Tensor | None:
        self._release()
        for torch_optimizer in self._optimizers:
            self._scaler.unscale_(torch_optimizer)
        norm = nn.utils.get_total_norm(
            [parameter.grad for parameter in self._trained if parameter.grad is not None]
        )
        if self._clip is not None:
            nn.utils.clip_grads_with_norm_(self._trained, self._clip, norm)
        for torch_optimizer, rate_schedule in zip(self._optimizers, self._schedules, strict=True):
            self._scaler.step(torch_optimizer)  # skipped if a gradient has overflowed
            rate_schedule.step()
            torch_optimizer.zero_grad(set_to_none=True)
        self._scaler.update()
        if self._average is not None:
            self._average.update()
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def lr(self) -> float:
        return float(self._schedules[0].get_last_lr()[0])

    def _release(self) -> None:
        """Make the parameters hold the fp32 weights instead of their 16-bit copies."""
        if self._masters is not None:
            self._masters.release()

    def averaged(self) -> AbstractContextManager[None]:
        return nullcontext() if self._average is None else self._average.in_place()

    def save_checkpoint(self, job: TrainJob, env: RankEnv, step: int) -> None:
        self._release()
        checkpoint.save(self.module, self._optimizers, self._average, self._scaler, job, env, step)

    def trained_state(self, job: TrainJob) -> dict[str, Any] | None:
        if not _uses_fully_shard(job):
            self._release()
            return None
        options = StateDictOptions(
            full_state_dict=True, cpu_offload=True, ignore_frozen_params=job.plan.adapters
        )
        state = get_model_state_dict(self.module, options=options)
        if job.plan.adapters:
            return state  # PEFT looks up every name
        all_names = {name for name, _ in self.module.named_parameters(remove_duplicate=False)}
        # second names of tied parameters
        tied = all_names - {name for name, _ in self.module.named_parameters()}
        return {name: tensor for name, tensor in state.items() if name not in tied}


def _uses_fully_shard(job: TrainJob) -> bool:
    """Whether the model is under fully_shard.

    It is for several processes, for states in host memory, and for image models in mixed precision.
    """
    layout = job.plan.layout
    mixed_unet = TASKS[job.settings.task].images and _is_mixed(job)
    return layout.sharding != "none" or layout.offload == "cpu" or mixed_unet


def _is_mixed(job: TrainJob) -> bool:
    return job.plan.layout.precision in ("bf16-mixed", fp16.PRECISION)


def _load(job: TrainJob, env: RankEnv, device: torch.device) -> Any:
    """Load the job's model in training mode and shard it. Only rank 0 reads the weights, on the CPU.

    A model that is not sharded is read into the GPU's memory.
    """
    if not _uses_fully_shard(job):
        reads_on_gpu = (
            device.type == "cuda" and not TASKS[job.settings.task].images and not quantized.kind_of(job)
        )
        options = {"device_map": device} if reads_on_gpu else {}
        network = _made_trainable(_pretrained(job, device, **options), job).to(device)
        kernels.set_up(network, job)
        return network
    full_model = _made_trainable(_pretrained(job, device), job) if env.rank == 0 else None
    network = _without_weights(job)
    kernels.set_up(network, job)
    if full_model is not None:
        # transformers looks up the files' tensor names by the model's class, which fully_shard replaces
        base = network.get_base_model() if hasattr(network, "get_base_model") else network
        base._weight_conversions = getattr(full_model, "_weight_conversions", None)
    _shard(network, job, device)
    _distribute_weights(full_model, network, job, device)
    return network


def _storage_dtype(job: TrainJob) -> torch.dtype:
    """Return the type of the base's weights: fp32 if they are trained in mixed precision."""
    return torch.float32 if _is_mixed(job) and not job.plan.adapters else model.dtype_of(job)


def _pretrained(job: TrainJob, device: torch.device, **options: Any) -> Any:
    """Load the job's model with parameters of one type, which a shard's collectives need.

    transformers keeps some parameters in fp32 in some families, such as DeepSeek V4's norms.
    """
    network = model.pretrained(job, dtype=_storage_dtype(job), device=device, **options)
    for parameter in network.parameters():
        parameter.data = parameter.data.to(_storage_dtype(job))
    return network


def _made_trainable(network: Any, job: TrainJob) -> Any:
    return model.made_trainable(network, job, adapters_in_fp32=_is_mixed(job))


def _without_weights(job: TrainJob) -> Any:
    """Return the model with its parameters on the meta device; buffers have their values."""
    with collector_paused():
        from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=False):
        network = model.unloaded(job, dtype=_storage_dtype(job))
    if not unet.is_unet(network):
        network.tie_weights()  # registration creates a separate parameter for each name
    with init_empty_weights(include_buffers=False):
        if kind := quantized.kind_of(job):
            quantized_model.replace_layers(network, kind)
        return _made_trainable(network, job)


def _shard(network: Any, job: TrainJob, device: torch.device) -> None:
    """Shard each block, and then the rest of the model (embedding, last norm, head)."""
    layout = job.plan.layout
    options: dict[str, Any] = {
        "mesh": _mesh(job, device),
        "mp_policy": _policy(job),
        "offload_policy": _offload(job, device),
        "reshard_after_forward": layout.sharding != "shard_grad_op",
    }
    for block in blocks(network):
        fully_shard(block, **options)
    fully_shard(network, **options)


def _mesh(job: TrainJob, device: torch.device) -> DeviceMesh:
    """Arrange the ranks in one dimension, or with replicas in two: [replicas, shards of a replica]."""
    layout = job.plan.layout
    if layout.replicate == 1:
        return init_device_mesh(device.type, (layout.world_size,))
    shape = (layout.replicate, layout.world_size // layout.replicate)
    return init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))


def _policy(job: TrainJob) -> MixedPrecisionPolicy:
    """Gather weights in 16 bits and sum gradients in fp32 for mixed precision; use one type otherwise."""
    if not _is_mixed(job):
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=model.dtype_of(job), reduce_dtype=torch.float32)


def _offload(job: TrainJob, device: torch.device) -> OffloadPolicy:
    if job.plan.layout.offload != "cpu":
        return OffloadPolicy()
    return CPUOffloadPolicy(pin_memory=device.type == "cuda")


def _distribute_weights(full_model: Any, network: Any, job: TrainJob, device: torch.device) -> None:
    """Distribute rank 0's weights over the ranks, one tensor at a time.

    ``full_model`` is None on the other ranks, which hold one full tensor at a time.
    """
    source = {} if full_model is None else dict(full_model.named_parameters())
    parts: dict[int, nn.Parameter] = {}
    for name, parameter in network.named_parameters():
        if full_model is None:
            tensor = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
        else:
            tensor = source.pop(name).detach().to(device)
        part: torch.Tensor = distribute_tensor(tensor, parameter.device_mesh, parameter.placements)
        if job.plan.layout.offload == "cpu":
            part = part.cpu()
        parts[id(parameter)] = nn.Parameter(part, requires_grad=parameter.requires_grad)
    # Tied weights have two names and one parameter
    parameters = network.named_parameters(remove_duplicate=False)
    network.load_state_dict(
        {name: parts[id(weight)] for name, weight in parameters}, strict=False, assign=True
    )
    full_buffers = {} if full_model is None else dict(full_model.named_buffers())
    # Loaded buffers may be in fp32 where those of the empty model are not, such as biases of routers
    dtype_names = {name: str(buffer.dtype).removeprefix("torch.") for name, buffer in full_buffers.items()}
    dtype_names = gather_json(dtype_names, device)[0]
    for name, buffer in network.named_buffers():
        owner, _, last = name.rpartition(".")
        tensor = full_buffers.get(name, buffer).to(device, getattr(torch, dtype_names[name]))
        dist.broadcast(tensor, src=0)
        network.get_submodule(owner)._buffers[last] = tensor
