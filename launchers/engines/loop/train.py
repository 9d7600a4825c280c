"""The training loop of one rank: step, telemetry, checkpoint, final output."""

from __future__ import annotations

import math
import time
from typing import Any

import torch
import torch.distributed as dist

from launchers.dataset.prepared import Prepared
from launchers.dataset.render import load_tokenizer
from launchers.engines.loop import compiled, export, self_check, unet, varlen
from launchers.engines.loop.evaluation import Evaluator
from launchers.engines.loop.feed import Feed
from launchers.engines.loop.sharding import ShardedModel, Sharding
from launchers.engines.loop.tasks import Task, task_of
from launchers.engines.neftune import EmbeddingNoise
from launchers.engines.profiling import Profiler
from launchers.engines.waiting import Waiting
from launchers.gang.job import TrainJob
from launchers.gang.leaving import Cadence
from launchers.gang.rank import RankEnv, RankReporter
from launchers.report.telemetry import Step


def train(job: TrainJob, sharding: Sharding) -> None:
    """Train one rank, from the newest checkpoint or from the weights (see Engine.train)."""
    env = RankEnv.read()
    device = sharding.start(job, env)
    reporter = RankReporter(job.telemetry_dir, env)
    reporter.started(
        device=f"{device} {torch.cuda.get_device_name(device)}" if device.type == "cuda" else "cpu",
        backend=dist.get_backend(),
        engine=sharding.name,
    )
    reporter.phase("load")
    job = self_check.checked(job, device, reporter.warned)
    model = sharding.load(job, env, device)
    merges = job.plan.adapters and job.settings.merges(job.plan.method)
    if merges and env.rank == 0 and not unet.is_unet(model.module):
        export.check_mergeable(model.module, job)
    data = Prepared(job.data_dir)
    images = None if job.settings.vision is None else load_tokenizer(job.model_dir, job.settings)
    task = task_of(job.settings, job.reference, padding_free=varlen.applies(job), images=images)
    task.check(model, data)
    feed = Feed(task, data, job, env.rank, device)
    profiler = Profiler(job, env, reporter, model.module)
    cadence = Cadence(job, env)
    evaluator = Evaluator(job, env, reporter, model.module, cadence, model.averaged)
    embedding = None if unet.is_unet(model.module) else model.module.get_input_embeddings()
    noise = EmbeddingNoise(embedding, job, env, data)
    evaluator.begin(model)
    waiting = Waiting(device)
    reporter.phase("train", job.start_step)
    step, fault = job.start_step, None
    while step < job.total_steps and not job.exports_only and not evaluator.stops:
        step += 1
        noise.begin(step)
        _step(model, job, env, data, task, feed, step, reporter, profiler, waiting)
        if fault is None and (fault := compiled.fault_of(model.module)):
            reporter.warned(f"compile off: torch.compile failed with {fault}. The blocks run eager")
        profiler.save(step)
        evaluator.after(step, model)
        if evaluator.is_kept(step):
            reporter.phase("checkpoint", step)
            model.save_checkpoint(job, env, step)
            cadence.finish(step)
            reporter.phase("train", step)
    if evaluator.is_exported(step):
        reporter.phase("save", step)
        with model.averaged():
            export.save(model, job, env)
    dist.barrier()
    reporter.phase("done", step)
    reporter.close()
    dist.destroy_process_group()


class _Stopwatch:
    """Measures seconds spent in parts of a step. On a GPU it records events, which do not synchronize."""

    def __init__(self, device: torch.device, profiler: Profiler) -> None:
        self._cuda, self._profiler = device.type == "cuda", profiler
        self._marks: list[tuple[str, Any]] = []

    def mark(self, part: str) -> None:
        """Assign the time until the next mark to ``part``."""
        self._profiler.phase(part)
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call,unused-ignore]
            event.record()
            self._marks.append((part, event))
        else:
            self._marks.append((part, time.perf_counter()))

    def seconds(self) -> dict[str, float]:
        """Return the seconds by part, once the device has finished. The last mark only ends a part."""
        total: dict[str, float] = {}
        for (part, start), (_, end) in zip(self._marks, self._marks[1:], strict=False):
            seconds = start.elapsed_time(end) / 1000 if self._cuda else end - start
            total[part] = total.get(part, 0.0) + seconds
        return total


def _step(
    model: ShardedModel,
    job: TrainJob,
    env: RankEnv,
    data: Prepared,
    task: Task,
    feed: Feed,
    step: int,
    reporter: RankReporter,
    profiler: Profiler,
    waiting: Waiting,
) -> None:
    """Run one optimizer step; ``step`` 1 is the first. The CPU waits for a GPU once, to read the metrics."""
    layout = job.plan.layout
    profiler.begin(step)
    waiting.begin()
    start, stopwatch = time.perf_counter(), _Stopwatch(model.device, profiler)
    lr = model.lr()
    stopwatch.mark("forward")
    task.begin(model, data, layout, step - 1, env.rank)
    stopwatch.mark("data")
    counts, batches = feed.step(step - 1)
    summed = torch.zeros(1 + len(task.metrics), device=model.device)  # the loss, then the metrics
    tokens = 0
    for number, batch in enumerate(batches, 1):
        stopwatch.mark("forward")
        outcome = task.outcome(model, batch, counts)
        stopwatch.mark("backward")
        model.backward(outcome.loss, counts.divisor, last=number == layout.accumulation)
        stopwatch.mark("data")
        summed += torch.stack([outcome.loss.detach(), *(outcome.metrics[name] for name in task.metrics)])
        tokens += batch.tokens
    stopwatch.mark("optimizer")
    norm = model.update()
    stopwatch.mark("end")
    if layout.world_size > 1:
        dist.all_reduce(summed)
    feed.prepare(step)
    sums, grad_norm = _fetch(summed, norm)
    loss, *metrics = [value / counts.divisor for value in sums]
    part_seconds, step_seconds = stopwatch.seconds(), time.perf_counter() - start
    profiler.end()
    reporter.step(
        Step(
            rank=env.rank,
            step=step,
            loss=loss if env.rank == 0 else None,
            metrics=_without_nan(dict(zip(task.metrics, metrics, strict=True))) if env.rank == 0 else None,
            lr=lr,
            grad_norm=grad_norm,
            samples=layout.micro_batch_size * layout.accumulation,
            tokens=tokens,
            dt=step_seconds,
            dtf=part_seconds.get("forward"),
            dtb=part_seconds.get("backward"),
            in_collectives=waiting.seconds(),
        )
    )


def _fetch(sums: torch.Tensor, norm: torch.Tensor | None) -> tuple[list[float], float | None]:
    """Copy a step's sums and the gradients' norm to the CPU, in one copy that waits for the GPU."""
    if norm is None:
        return sums.tolist(), None
    *values, last = torch.cat([sums, norm.detach().to(sums).reshape(1)]).tolist()
    return values, last if math.isfinite(last) else None  # fp16 gradients may overflow, which skips the step


def _without_nan(metrics: dict[str, float]) -> dict[str, float]:
    """Remove metrics without a value in this step, which are NaN."""
    return {name: value for name, value in metrics.items() if not math.isnan(value)}
