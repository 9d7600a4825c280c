"""The training loop of one rank: step, telemetry, checkpoint, final output."""

from __future__ import annotations

import os
import random
import time
import warnings
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from launchers.dataset.batches import counted_labels, micro_batches, summed_cross_entropy
from launchers.dataset.prepared import Prepared
from launchers.engines import _merge
from launchers.engines.deepspeed import checkpoint as deepspeed_checkpoint
from launchers.engines.deepspeed import config as deepspeed_config
from launchers.engines.deepspeed import export as deepspeed_export
from launchers.engines.deepspeed import model as deepspeed_model
from launchers.gang.job import TrainJob
from launchers.gang.rank import RankEnv, RankReporter
from launchers.imports import collector_paused


def train(job: TrainJob) -> None:
    """Train one rank with DeepSpeed, from the newest checkpoint or from the weights (see Engine.train)."""
    env = RankEnv.read()
    device = _start_distributed(job, env)
    reporter = RankReporter(job.telemetry_dir, env)
    reporter.started(
        device=f"{device} {torch.cuda.get_device_name(device)}" if device.type == "cuda" else "cpu",
        backend=dist.get_backend(),
        engine="deepspeed",
    )
    reporter.phase("load")
    engine = _engine(job, env, device)
    data = Prepared(job.data_dir)
    reporter.phase("train", job.start_step)
    for step in range(job.start_step + 1, job.total_steps + 1):
        _step(engine, job, env, data, step, reporter)
        if job.checkpoint_every and step % job.checkpoint_every == 0 and step < job.total_steps:
            reporter.phase("checkpoint", step)
            deepspeed_checkpoint.save(engine, job, env, step)
            reporter.phase("train", step)
    if job.keeps_result:
        reporter.phase("save", job.total_steps)
        deepspeed_export.save(engine, job, env)
    dist.barrier()
    reporter.phase("done", job.total_steps)
    reporter.close()
    dist.destroy_process_group()


def _start_distributed(job: TrainJob, env: RankEnv) -> torch.device:
    cuda = job.plan.layout.device == "cuda"
    if not cuda:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    with collector_paused():
        import deepspeed
        import deepspeed.ops

    if not cuda:
        # For inference only; init_distributed would compile it for a minute, or fail without a compiler.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # DeepSpeed's calls of torch.distributed by their older names, a line each time
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


def _engine(job: TrainJob, env: RankEnv, device: torch.device) -> Any:
    """DeepSpeed's engine around the model, resumed if the job says so."""
    import deepspeed

    universal = deepspeed_checkpoint.needs_conversion(job)
    converted = deepspeed_checkpoint.convert(job, env) if universal else None
    _seed(job.settings.seed)
    model = deepspeed_model.load(job, deepspeed_config.configuration(job), device)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # with ZeRO-3 a parameter holds a shard; ds_numel is what it was
    size = sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in trained)
    config = deepspeed_config.configuration(job, trained=size, load_universal=universal)
    if env.local_rank == 0:
        deepspeed_config.write(job, config)
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=trained,
        optimizer=None if "optimizer" in config else deepspeed_model.optimizer(job, trained),
        lr_scheduler=None if "scheduler" in config else deepspeed_model.schedule(job),
        config=config,
    )
    if engine.bfloat16_enabled() and not engine.zero_optimization():
        # To make its states, this wrapper has stepped the optimizer with zero gradients: undo that.
        engine.basic_optimizer.state.clear()
        engine.optimizer.refresh_fp32_params()
    _seed(job.settings.seed + env.rank + job.start_step * job.plan.layout.world_size)  # dropout
    if job.resume_dir is not None:
        deepspeed_checkpoint.restore(engine, job, env, converted)
    return engine


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


class _Stopwatch:
    """Seconds spent in parts of a step. On a GPU by events, so that nothing has to wait for it."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: list[tuple[str, Any]] = []

    def mark(self, part: str) -> None:
        """From here on, until the next mark, time belongs to ``part``."""
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call,unused-ignore]
            event.record()
            self._marks.append((part, event))
        else:
            self._marks.append((part, time.perf_counter()))

    def seconds(self) -> dict[str, float]:
        """Call when the device has done all; the last mark only ends the one before it."""
        total: dict[str, float] = {}
        for (part, begin), (_, end) in zip(self._marks, self._marks[1:], strict=False):
            spent = begin.elapsed_time(end) / 1000 if self._cuda else end - begin
            total[part] = total.get(part, 0.0) + spent
        return total


def _step(
    engine: Any, job: TrainJob, env: RankEnv, data: Prepared, step: int, reporter: RankReporter
) -> None:
    """One optimizer step; ``step`` 1 is the first."""
    layout = job.plan.layout
    begin, watch = time.perf_counter(), _Stopwatch(engine.device)
    lr = engine.get_lr()[0]
    counted = max(1, counted_labels(data, step - 1, layout.global_batch_size))
    # DeepSpeed divides by the accumulation and averages over the ranks; the loss is a mean over tokens.
    scale = layout.accumulation * layout.data_parallel / counted
    summed, tokens = torch.zeros((), device=engine.device), 0
    for batch in micro_batches(data, layout, step - 1, env.rank):
        batch = batch.to(engine.device)
        watch.mark("forward")
        logits = engine(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False).logits
        loss = summed_cross_entropy(logits, batch.labels)
        watch.mark("backward")
        engine.backward(loss * scale)
        watch.mark("optimizer")
        last = engine.is_gradient_accumulation_boundary()
        norm = _local_norm(engine) if last else None
        engine.step()
        summed += loss.detach()
        tokens += batch.tokens
    watch.mark("end")
    dist.all_reduce(summed)
    loss_value = summed.item() / counted  # waits for the GPU
    spent = watch.seconds()
    grad_norm = norm if norm is not None else engine.get_global_grad_norm()
    reporter.step(
        step=step,
        loss=loss_value if env.rank == 0 else None,
        lr=lr,
        grad_norm=None if grad_norm is None else float(grad_norm),
        samples=layout.micro_batch_size * layout.accumulation,
        tokens=tokens,
        dt=time.perf_counter() - begin,
        dtf=spent.get("forward"),
        dtb=spent.get("backward"),
    )


def _local_norm(engine: Any) -> float | None:
    """The gradients' norm where DeepSpeed keeps none: without ZeRO in fp32, where every rank has them all."""
    if engine.zero_optimization() or engine.bfloat16_enabled():
        return None
    gradients = [p.grad for p in engine.module.parameters() if p.grad is not None]
    return float(torch.nn.utils.get_total_norm(gradients))
