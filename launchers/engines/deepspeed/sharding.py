"""DeepSpeed's ZeRO as the loop's sharding."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from launchers.base.imports import collector_paused
from launchers.engines import _merge
from launchers.engines.deepspeed import checkpoint, config
from launchers.engines.loop import export, generators, head, model, optimizer, quantized
from launchers.engines.loop.compiled import compile_blocks
from launchers.engines.loop.families import expert_blocks
from launchers.gang.job import TrainJob
from launchers.gang.rank import RankEnv


class Zero:
    """ZeRO 0 to 3; see launchers.engines.loop.sharding.Sharding."""

    name = "deepspeed"

    def start(self, job: TrainJob, env: RankEnv) -> torch.device:
        cuda = job.plan.layout.device == "cuda"
        if not cuda:
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
        with collector_paused():
            import deepspeed
            import deepspeed.ops

        if not cuda:
            # An extension for inference only: init_distributed would compile it for a minute, or fail.
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        # DeepSpeed calls torch.distributed by deprecated names, with a warning each time
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
        device = torch.device("cuda", env.local_rank) if cuda else torch.device("cpu")
        if cuda:
            torch.cuda.set_device(device)
        deepspeed.init_distributed(
            dist_backend="nccl" if cuda else "gloo",
            auto_mpi_discovery=False,
            timeout=_merge.LIMIT,  # for a rank that merges an adapter or converts a checkpoint
        )
        return device

    def load(self, job: TrainJob, env: RankEnv, device: torch.device) -> ZeroModel:
        import deepspeed

        universal = checkpoint.needs_conversion(job)
        converted = checkpoint.convert(job, env, device) if universal else None
        generators.seed(job.settings.seed)
        network = _load(job, config.configuration(job), device)
        named_parameters = [
            (name, weight) for name, weight in network.named_parameters() if weight.requires_grad
        ]
        trained = [parameter for _, parameter in named_parameters]
        # with ZeRO-3 a parameter holds a shard; ds_numel is its full size
        size = sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in trained)
        values = config.configuration(job, trained=size, load_universal=universal)
        if env.local_rank == 0:
            config.write(job, values)
        engine, *_ = deepspeed.initialize(
            model=network,
            model_parameters=trained,
            optimizer=None if "optimizer" in values else optimizer.build(job, named_parameters)[0],
            lr_scheduler=None if "scheduler" in values else optimizer.schedule(job),
            config=values,
        )
        if engine.bfloat16_enabled() and not engine.zero_optimization():
            # DeepSpeed stepped the optimizer with zero gradients to create its states: undo that.
            engine.basic_optimizer.state.clear()
            engine.optimizer.refresh_fp32_params()
        generators.seed_rank(job, env)
        if job.resume_dir is not None:
            checkpoint.restore(engine, job, env, converted)
        return ZeroModel(engine, job)


class ZeroModel:
    """DeepSpeed's engine; see launchers.engines.loop.sharding.ShardedModel."""

    def __init__(self, engine: Any, job: TrainJob) -> None:
        layout = job.plan.layout
        self._engine = engine
        self.device: torch.device = engine.device
        self.module: Any = engine.module
        # DeepSpeed divides gradients by the accumulation steps and the ranks; losses are divided by tokens.
        self._deepspeed_divisor = layout.accumulation * layout.data_parallel
        self._norm: torch.Tensor | None = None

    def logits(self, **inputs: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self._engine(**inputs, use_cache=False).logits
        return logits

    def fused_loss(self, labels: torch.Tensor, **inputs: torch.Tensor) -> torch.Tensor:
        return head.loss(self._engine, labels, inputs)

    def backward(self, loss: torch.Tensor, counted: int, *, last: bool) -> None:
        self._engine.backward(loss * (self._deepspeed_divisor / counted))
        if last:
            self._norm = _local_norm(self._engine)
        else:
            self._engine.step()  # counts the micro batches

    def update(self) -> torch.Tensor | None:
        self._engine.step()
        norm = self._norm if self._norm is not None else self._engine.get_global_grad_norm()
        return None if norm is None else torch.as_tensor(norm, device=self.device)

    def lr(self) -> float:
        return float(self._engine.get_lr()[0])

    def averaged(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()  # only image runs keep an average; not with DeepSpeed

    def save_checkpoint(self, job: TrainJob, env: RankEnv, step: int) -> None:
        checkpoint.save(self._engine, job, env, step)

    def trained_state(self, job: TrainJob) -> dict[str, Any] | None:
        if config.zero_stage(job) != 3:
            return None
        state: dict[str, Any] | None = self._engine._zero3_consolidated_16bit_state_dict(
            exclude_frozen_parameters=job.plan.adapters
        )
        return state


def _load(job: TrainJob, values: dict[str, Any], device: torch.device) -> Any:
    """Load the job's model in training mode; with ZeRO-3 each rank holds only its shard.

    HfDeepSpeedConfig makes transformers load shards. It must live as long as the model, which refers to it.
    transformers cannot shard a quantized base: each rank holds all of it until deepspeed.initialize.
    """
    sharded = config.zero_stage(job) == 3 and quantized.kind_of(job) is None
    options, hf_config = dict[str, Any](), None
    if sharded:
        from transformers.integrations import HfDeepSpeedConfig

        hf_config = HfDeepSpeedConfig(values)
    elif device.type == "cuda":
        options["device_map"] = {"": device}
    with _weights_read_by_first_rank() if sharded else contextlib.nullcontext():
        network = model.pretrained(job, dtype=model.dtype_of(job), device=device, **options)
    network.hf_deepspeed_config = hf_config
    if sharded:
        _drop_unused_prefixes(network, export.tensor_names(job))
        _fetch_expert_blocks_whole(network)
    network = model.made_trainable(network, job)
    if job.settings.compile:
        compile_blocks(network, required="compile" not in job.settings.automatic_choices)
    return network


def _drop_unused_prefixes(network: Any, names: set[str]) -> None:
    """Drop recorded removals of name prefixes that the tensors ``names`` of the base's files do not have.

    An export reverts the recorded changes of names. With ZeRO-3, transformers (5.23,
    integrations/deepspeed.py) records all changes of the family, not only the applied ones.
    """
    from transformers.core_model_loading import PrefixChange

    def is_applied(change: Any) -> bool:
        if not isinstance(change, PrefixChange) or change.prefix_to_remove is None:
            return True
        prefix = ".".join(filter(None, (change.model_prefix, change.prefix_to_remove)))
        return any(name.startswith(f"{prefix}.") for name in names)

    changes = getattr(network, "_weight_conversions", None)
    if changes is not None:
        network._weight_conversions = [change for change in changes if is_applied(change)]


@contextlib.contextmanager
def _weights_read_by_first_rank() -> Iterator[None]:
    """Let only the first rank read weights, and the others only names and shapes; used with ZeRO-3.

    transformers (5.4, integrations/deepspeed.py) reads all files in each rank, but uses only the first
    rank's tensors. Memory-mapped files cost little, but experts are merged: a copy of the model in each rank.
    """
    from transformers import modeling_utils

    load_state_dict = modeling_utils.load_state_dict

    def read_shapes(file: Any, *_: Any, **options: Any) -> Any:
        return load_state_dict(file, **(options | {"map_location": "meta"}))

    if dist.get_rank() != 0:
        modeling_utils.load_state_dict = read_shapes
    try:
        yield
    finally:
        modeling_utils.load_state_dict = load_state_dict


def _fetch_expert_blocks_whole(network: Any) -> None:
    """Let ZeRO-3 gather each block of experts as one module (DeepSpeed's "leaf modules").

    All ranks must gather a module's weights together, but each rank uses different experts.
    """
    from deepspeed.utils import set_z3_leaf_modules

    if blocks := expert_blocks(network):
        set_z3_leaf_modules(network, list(blocks))


def _local_norm(engine: Any) -> torch.Tensor | None:
    """Compute the gradients' norm if DeepSpeed does not (fp32 without ZeRO, with unsharded gradients)."""
    if engine.zero_optimization() or engine.bfloat16_enabled():
        return None
    gradients = [p.grad for p in engine.module.parameters() if p.grad is not None]
    return torch.nn.utils.get_total_norm(gradients)
