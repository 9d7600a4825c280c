"""Evaluations on held-out rows while a rank trains, the same for every engine.

The measure is the task's loss, so a finished model gets the same result from launchers.evaluation.held_out.
Evaluations do not affect training: the model's modes and the random generators are restored, and no gradients
are computed.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from launchers.engines.loop import generators
from launchers.engines.loop.held_out import HeldOut, held_out_of
from launchers.engines.loop.sharding import Answering
from launchers.gang.job import TrainJob
from launchers.gang.leaving import Cadence
from launchers.gang.rank import RankEnv, RankReporter
from launchers.report.evaluations import HeldOutLoss, best_of, exported_step, stops_early
from launchers.report.telemetry import Evaluated, EvaluationImages

SIGN_S = 5.0  # interval between progress reports of a long evaluation


class Evaluator:
    """Evaluates a run, and decides after which steps it is evaluated, saved and stopped; on all ranks.

    For a job without evaluation, it only decides when checkpoints are written.

    Parameters
    ----------
    network:
        The trained model, or this rank's shard of it.
    cadence:
        Schedule of checkpoints in addition to those of evaluations.
    averaged:
        Context in which the model has the weights that are exported.
    """

    def __init__(
        self,
        job: TrainJob,
        env: RankEnv,
        reporter: RankReporter,
        network: torch.nn.Module,
        cadence: Cadence,
        averaged: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._job, self._env, self._reporter, self._network = job, env, reporter, network
        self._cadence, self._averaged = cadence, averaged
        self._settings = job.settings.evaluation
        self._losses = list(job.evaluations)
        self._rows = held_out_of(job, env) if job.evaluates else None
        self._ended = time.monotonic()  # of the last evaluation

    @property
    def stops(self) -> bool:
        """Whether early stopping ends the run here."""
        return self._rows is not None and stops_early(self._losses, self._settings)

    def begin(self, model: Answering) -> None:
        """Draw pictures with the base model before the first step of a run, if the task has captions."""
        if self._rows is not None and self._job.start_step == 0:
            self._draw(0, model, self._rows)

    def after(self, step: int, model: Answering) -> None:
        """Evaluate the model after a step, if one is scheduled."""
        if self._rows is None or not self._is_due(step, model.device):
            return
        self._reporter.phase("evaluate", step)
        loss = self._evaluate(step, model, self._rows)
        self._losses.append(loss)
        rows = self._rows.count
        self._report(step, rows, rows, loss.seconds, loss)
        self._draw(step, model, self._rows)
        self._ended = time.monotonic()
        self._reporter.phase("train", step)

    def is_kept(self, step: int) -> bool:
        """Whether a checkpoint is scheduled after a step.

        The last step has none if its model is exported. If an earlier step is exported instead, the last step
        has a checkpoint, so that no later attempt trains again.
        """
        job = self._job
        if self.stops or step == job.total_steps:
            return not self.is_exported(step) and job.keeps_result
        is_due = self._cadence.writes_after(step)
        best = best_of(self._losses) if self._rows is not None and self._settings.keeps_best else None
        return is_due or (best is not None and best.step == step)

    def is_exported(self, last_step: int) -> bool:
        """Whether this model is the result of a run that has trained to ``last_step``."""
        if not self._job.keeps_result:
            return False
        return self._rows is None or exported_step(self._losses, self._settings, last_step) == last_step

    def _is_due(self, step: int, device: torch.device) -> bool:
        """Whether an evaluation is scheduled. Rank 0's clock decides on minutes, because clocks differ."""
        if step == self._job.total_steps:
            return True
        if self._settings.every_minutes is None:
            return step % (self._settings.every_steps or 1) == 0
        scheduled = time.monotonic() - self._ended >= self._settings.every_minutes * 60
        decided = torch.tensor([int(scheduled)], device=device)
        if dist.is_initialized():
            dist.broadcast(decided, src=0)
        return bool(decided.item())

    def _draw(self, step: int, model: Answering, rows: HeldOut) -> None:
        """Draw pictures of the held-out captions, if the task has any; rank 0 receives all of them."""
        if not rows.captions:
            return
        self._reporter.phase("evaluate", step)
        with self._averaged(), _evaluation_mode(self._network):
            pictures = rows.draw(model)
        if self._env.rank == 0:
            self._reporter.drawn(
                EvaluationImages(rank=0, step=step, captions=rows.captions, pictures=pictures)
            )

    def _evaluate(self, step: int, model: Answering, rows: HeldOut) -> HeldOutLoss:
        start = last_report = time.perf_counter()
        summed = torch.zeros(1 + len(rows.metrics), dtype=torch.float64, device=model.device)
        with self._averaged(), _evaluation_mode(self._network):
            for number, (batch, counts) in enumerate(rows.batches(), 1):
                outcome = rows.outcome(model, batch.to(model.device))
                figures = [outcome.loss, *(outcome.metrics[name] for name in rows.metrics)]
                if counts:
                    summed += torch.stack([figure.detach().double() for figure in figures])
                if time.perf_counter() - last_report > SIGN_S:
                    summed.sum().item()  # waits for the GPU, to report only finished work
                    last_report = time.perf_counter()
                    self._report(step, rows.count * number // rows.passes, rows.count, last_report - start)
        if dist.is_initialized():
            dist.all_reduce(summed)
            dist.broadcast(summed, src=0)  # bitwise equal, because each rank decides by it
        loss, *metrics = (summed / rows.divisor).tolist()
        return HeldOutLoss(
            step=step,
            loss=loss,
            metrics=dict(zip(rows.metrics, metrics, strict=True)),
            seconds=time.perf_counter() - start,
        )

    def _report(
        self, step: int, rows_evaluated: int, rows: int, seconds: float, loss: HeldOutLoss | None = None
    ) -> None:
        self._reporter.evaluated(
            Evaluated(
                rank=self._env.rank,
                step=step,
                done=rows_evaluated,
                rows=rows,
                seconds=seconds,
                loss=None if loss is None else loss.loss,
                metrics=None if loss is None else loss.metrics,
            )
        )


@contextlib.contextmanager
def _evaluation_mode(network: torch.nn.Module) -> Iterator[None]:
    """Enter evaluation mode without gradients; on exit, restore everything, sharded weights included."""
    training = [module for module in network.modules() if module.training]
    network.eval()
    with torch.no_grad(), generators.kept():
        yield
    for module in training:
        module.training = True
    for module in network.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
