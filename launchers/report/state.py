"""State of a training run on one node, computed from the telemetry of the node's ranks."""

from __future__ import annotations

import copy
import dataclasses
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from estimator.plan import Plan
from estimator.vocabulary import TASKS
from launchers.report.evaluations import HeldOutLoss, best_of
from launchers.report.metrics import Metrics, median, typical
from launchers.report.peak import MemoryPeak, largest_process
from launchers.report.stragglers import late_lines
from launchers.report.telemetry import (
    DistInfo,
    Evaluated,
    EvaluationImages,
    Event,
    Memory,
    Phase,
    Profiled,
    Step,
    Straggling,
    Warned,
)

if TYPE_CHECKING:
    from launchers.report.window import Window

ETA_STEPS = 20  # number of newest steps whose median time the ETA assumes for the remaining steps
KEPT_IMAGE_SETS = 2  # newest evaluations whose images are kept, besides those of the base model


@dataclass(frozen=True, kw_only=True, slots=True)
class RankMeasured:
    """Measurements of one training process. torch's figures are None on a CPU."""

    rank: int
    host: str = ""
    device: str = ""
    allocated_peak_bytes: int | None = None
    reserved_peak_bytes: int | None = None
    rss_peak_bytes: int | None = None
    tokens_per_second: float | None = None


class RunState:
    """State for terminal, trackers, card and artifacts, updated with the telemetry events of a node's ranks.

    The duration of a step is rank 0's; on a node without rank 0, the slowest local rank's. :meth:`add`,
    :meth:`notes` and :meth:`snapshot` are thread-safe; use the properties only in the thread that calls
    :meth:`add`, or on a snapshot.

    Parameters
    ----------
    plan:
        Plan of this attempt; None for runs without a plan.
    total_steps:
        Optimizer steps of the whole run; None if unknown.
    tokens_of_steps:
        Tokens that go through the model in each step, over all processes of the run, without padding. None:
        unknown; the mean of this node's processes is then assumed for all processes.
    """

    def __init__(
        self,
        plan: Plan | None = None,
        *,
        total_steps: int | None = None,
        tokens_of_steps: Sequence[int] | None = None,
    ) -> None:
        self.plan = plan
        self.total_steps = total_steps
        self.tokens_of_steps = tokens_of_steps
        self._lock = threading.Lock()
        self._infos: dict[int, DistInfo] = {}  # by rank
        self._phases: dict[int, Phase] = {}  # by rank
        self._memory: dict[int, Memory] = {}  # newest report by rank; its peaks only grow
        self._memory_series: list[Memory] = []
        self._steps: dict[int, dict[int, Step]] = {}  # by step and rank; only steps of this attempt
        self._metrics: dict[int, Metrics] = {}  # by step, including restored steps
        self._trained_s = 0.0
        self._evaluated_s = 0.0
        self._checkpoints_s: list[float] = []  # duration of each checkpoint on each rank
        self._evaluations: dict[int, HeldOutLoss] = {}  # by step
        self._evaluation_images: dict[int, EvaluationImages] = {}  # by step
        self._windows: list[Window] = []
        self._late: dict[int, Straggling] = {}  # newest event by rank
        self._warnings: dict[str, None] = {}  # texts without repetition, in order

    def add(self, event: Event) -> None:
        """Update the state with an event."""
        with self._lock:
            if isinstance(event, Step):
                self._add_step(event)
            elif isinstance(event, Memory):
                self._memory[event.rank] = event
                self._memory_series.append(event)
            elif isinstance(event, Phase):
                previous = self._phases.get(event.rank)
                if previous is not None and previous.name == "checkpoint" and event.name == "train":
                    self._checkpoints_s.append(event.at - previous.at)
                self._phases[event.rank] = event
            elif isinstance(event, DistInfo):
                self._infos[event.rank] = event
            elif isinstance(event, Profiled) and event.window:
                from launchers.report.window import Window

                self._windows.append(Window.from_dict(event.window))
            elif isinstance(event, EvaluationImages):
                self._add_images(event)
            elif isinstance(event, Straggling):
                self._late[event.rank] = event
            elif isinstance(event, Warned):
                self._warnings[event.text] = None
            elif isinstance(event, Evaluated):
                self._add_evaluated(event)

    def notes(self, step: int, *, keeps_best: bool) -> dict[str, Any]:
        """Return metrics, evaluations and images up to a step, to be stored in its checkpoint."""
        with self._lock:
            evaluations = [evaluation for evaluation in self.evaluations if evaluation.step <= step]
            best = best_of(evaluations) if keeps_best else None
            return {
                "metrics": [metrics.to_dict() for metrics in self.metrics if metrics.step <= step],
                "evaluations": [evaluation.to_dict() for evaluation in evaluations],
                "drawn": [
                    dataclasses.asdict(images) for images in self.evaluation_images if images.step <= step
                ],
                "best_step": None if best is None else best.step,
            }

    def restore(self, notes: Mapping[str, Any], *, with_metrics: bool) -> None:
        """Restore the :meth:`notes` of an earlier attempt, whose times do not count for the ETA."""
        with self._lock:
            for values in notes.get("evaluations", ()):
                self._evaluations[values["step"]] = HeldOutLoss(**values)
            for values in notes.get("drawn", ()):
                self._add_images(EvaluationImages(**values))
            if with_metrics:
                self._metrics = {entry["step"]: Metrics(**entry) for entry in notes.get("metrics", ())}

    def snapshot(self) -> RunState:
        """Return a copy that later events do not change."""
        copied = RunState()
        with self._lock:
            values = {name: copy.copy(value) for name, value in vars(self).items() if name != "_lock"}
        vars(copied).update(values)
        return copied

    @property
    def infos(self) -> tuple[DistInfo, ...]:
        """Placement of each rank that has reported it."""
        return tuple(info for _, info in sorted(self._infos.items()))

    @property
    def phases(self) -> dict[int, str]:
        """Rank -> name of its current phase."""
        return {rank: phase.name for rank, phase in self._phases.items()}

    @property
    def phase(self) -> str:
        """Phase that has lasted longest among the ranks; empty before the first report."""
        oldest = min(self._phases.values(), key=lambda phase: phase.at, default=None)
        return oldest.name if oldest else ""

    @property
    def steps(self) -> tuple[Metrics, ...]:
        """Metrics of all steps in order, including restored ones; without losses on a node without rank 0."""
        return tuple(metrics for _, metrics in sorted(self._metrics.items()))

    @property
    def metrics(self) -> tuple[Metrics, ...]:
        """Metrics of the steps that rank 0 has reported; empty on a node without rank 0."""
        return tuple(metrics for metrics in self.steps if metrics.loss is not None)

    def step(self, number: int) -> Metrics:
        """Return the metrics of a step; raises KeyError before a rank has reported it."""
        return self._metrics[number]

    @property
    def last_step(self) -> int:
        """Number of the newest step of this attempt; 0 before the first."""
        return max(self._steps, default=0)

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second of the run, as median over the steps; None if no step reported tokens."""
        return typical(self.steps, lambda metrics: metrics.tokens_per_second) or None

    @property
    def step_tokens(self) -> float | None:
        """Tokens of one step without padding, over all processes, as median over the steps; None: unknown."""
        return typical(self.steps, lambda metrics: metrics.tokens_per_second * metrics.dt) or None

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilization, as median over the steps; None if unknown."""
        return typical(self.steps, lambda metrics: metrics.mfu) or None

    @property
    def eta_seconds(self) -> float | None:
        """Seconds until the last step; None before this attempt's first step or if the total is unknown."""
        return self._eta_after(self.last_step)

    @property
    def data_waits(self) -> dict[int, tuple[float, float]]:
        """Median (seconds of waiting for data, seconds of the step) by rank; only ranks that report it.

        The first step, which includes warm-up, counts only if there is no other.
        """
        waits: dict[int, list[tuple[float, float]]] = {}
        for _, ranks in sorted(self._steps.items()):
            for rank, step in ranks.items():
                if step.loading is not None:
                    waits.setdefault(rank, []).append((step.loading, step.dt))
        medians = {}
        for rank, steps in sorted(waits.items()):
            loading, dt = (median(column) or 0.0 for column in zip(*(steps[1:] or steps), strict=True))
            medians[rank] = (loading, dt)
        return medians

    @property
    def checkpoint_seconds(self) -> float | None:
        """Median time for which a checkpoint interrupts training; None before the first checkpoint."""
        return median(self._checkpoints_s)

    @property
    def ranks(self) -> tuple[RankMeasured, ...]:
        """Measurements of each rank of this node."""
        ranks = {rank for step in self._steps.values() for rank in step}
        ranks |= {*self._infos, *self._phases, *self._memory}
        return tuple(self._measurements_of(rank) for rank in sorted(ranks))

    @property
    def memory(self) -> tuple[Memory, ...]:
        """Memory reports of all ranks in the order of arrival."""
        return tuple(self._memory_series)

    @property
    def memory_peak(self) -> MemoryPeak | None:
        """Peak of the largest process: torch's reserved memory on GPUs, resident memory on CPUs."""
        ranks = self._memory.values()
        return largest_process((rank.reserved_peak for rank in ranks), (rank.rss_peak for rank in ranks))

    @property
    def windows(self) -> tuple[Window, ...]:
        """Profiled windows, of one rank each."""
        return tuple(sorted(self._windows, key=lambda window: window.rank))

    @property
    def evaluations(self) -> tuple[HeldOutLoss, ...]:
        """Losses on held-out rows in the order of their steps, restored ones included."""
        return tuple(loss for _, loss in sorted(self._evaluations.items()))

    @property
    def evaluation_images(self) -> tuple[EvaluationImages, ...]:
        """Images of held-out captions: of the base model (step 0), then of the newest evaluations."""
        return tuple(event for _, event in sorted(self._evaluation_images.items()))

    @property
    def straggler_lines(self) -> tuple[str, ...]:
        """Descriptions of the ranks or nodes that delay the others, or did before."""
        on_gpus = self.plan is not None and self.plan.layout.device == "cuda"
        return tuple(late_lines(self._late.values(), on_gpus=on_gpus))

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings of this node's ranks, each once."""
        return tuple(self._warnings)

    @property
    def _world_size(self) -> int:
        if self._infos:
            return next(iter(self._infos.values())).world_size
        return self.plan.layout.world_size if self.plan else max(map(len, self._steps.values()), default=1)

    def _add_step(self, event: Step) -> None:
        """Store a rank's report of a step, and update the metrics of the step unless they are complete."""
        ranks = self._steps.setdefault(event.step, {})
        ranks[event.rank] = event
        earlier = self._metrics.get(event.step)
        measured = next((step for step in ranks.values() if step.loss is not None), None)
        tokens_known = self.tokens_of_steps is not None or (measured and measured.all_tokens is not None)
        if measured is not None and measured is not event and tokens_known:
            return  # rank 0 has already reported the figures of this step
        measured = measured or max(ranks.values(), key=lambda step: step.dt)
        self._trained_s += measured.dt - (earlier.dt if earlier else 0.0)
        self._metrics[event.step] = self._step_metrics(measured, ranks)

    def _step_metrics(self, measured: Step, ranks: Mapping[int, Step]) -> Metrics:
        """Compute the metrics of a step from the reports of all ranks; ``measured`` has the duration."""
        world, reports, dt, plan = self._world_size, ranks.values(), measured.dt, self.plan
        samples = sum(step.samples for step in reports) / len(ranks) * world
        if plan is not None:
            samples = plan.layout.global_batch_size
        tokens: float | None = measured.all_tokens
        if tokens is None and self.tokens_of_steps is not None and measured.step <= len(self.tokens_of_steps):
            tokens = self.tokens_of_steps[measured.step - 1]
        if tokens is None:
            tokens = sum(step.tokens for step in reports) / len(ranks) * world
        samples_per_second, tokens_per_second = (n / dt if dt > 0 else 0.0 for n in (samples, tokens))
        is_image_run = plan is not None and TASKS[plan.task].images  # FLOPs of UNets are unknown
        peak = plan.prediction.peak_flops_per_gpu if plan and not is_image_run else None
        return Metrics(
            step=measured.step,
            loss=measured.loss,
            lr=measured.lr,
            grad_norm=measured.grad_norm,
            dt=dt,
            dtf=measured.dtf,
            dtb=measured.dtb,
            samples_per_second=samples_per_second,
            samples_per_second_per_gpu=samples_per_second / world,
            tokens_per_second=tokens_per_second,
            tokens_per_second_per_gpu=tokens_per_second / world,
            mfu=tokens_per_second * plan.prediction.flops_per_token / (world * peak)
            if plan and peak
            else None,
            eta_seconds=self._eta_after(measured.step, dt),
            task=measured.metrics or {},
            is_image_run=is_image_run,
        )

    def _eta_after(self, step: int, dt: float | None = None) -> float | None:
        """Estimate the seconds left after ``step``, with the same share of time for evaluations as so far.

        ``dt``: duration of the step, if it is not among the metrics yet.
        """
        if not self.total_steps or not self._steps:
            return None
        newest = islice(reversed(self._steps), ETA_STEPS)
        recent = [dt if number == step and dt is not None else self._metrics[number].dt for number in newest]
        training_s = (median(recent) or 0.0) * max(self.total_steps - step, 0)
        return training_s * (1 + self._evaluated_s / self._trained_s) if self._trained_s > 0 else training_s

    def _add_evaluated(self, event: Evaluated) -> None:
        """Store the loss of an evaluation from the first rank that reports it; the others report the same."""
        if event.loss is None or event.step in self._evaluations:
            return
        self._evaluations[event.step] = HeldOutLoss(
            step=event.step, loss=event.loss, metrics=event.metrics or {}, seconds=event.seconds
        )
        self._evaluated_s += event.seconds

    def _add_images(self, event: EvaluationImages) -> None:
        self._evaluation_images[event.step] = event
        for step in sorted(step for step in self._evaluation_images if step)[:-KEPT_IMAGE_SETS]:
            del self._evaluation_images[step]

    def _measurements_of(self, rank: int) -> RankMeasured:
        steps = [ranks[rank] for ranks in self._steps.values() if rank in ranks]
        info, memory = self._infos.get(rank), self._memory.get(rank)
        return RankMeasured(
            rank=rank,
            host=info.host if info else "",
            device=info.device if info else "",
            allocated_peak_bytes=memory.allocated_peak if memory else None,
            reserved_peak_bytes=memory.reserved_peak if memory else None,
            rss_peak_bytes=memory.rss_peak if memory else None,
            tokens_per_second=median([step.tokens / step.dt for step in steps[1:] or steps if step.dt > 0])
            or None,
        )
