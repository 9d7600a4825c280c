"""Metrics of a run as people know them, made from the ranks' telemetry.

dt, dtf, dtb: seconds of a step, of its forward and of its backward passes. MFU: model FLOPs utilisation,
tokens/s times the model's FLOPs for each token (recomputation not counted) over the GPUs' dense peak
(Chowdhery et al. 2022, PaLM, appendix B). A GPU whose peak is not known gives no MFU.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from estimator.plan import GIB, Plan
from estimator.setup import IMAGE_TASK
from launchers.dataset.prepared import Prepared
from launchers.report.telemetry import DistInfo, Evaluated, Event, Step

# Of a task's figures those that a line of the terminal has room for
SHOWN = {"reward": "reward", "kl": "KL"}
SHOWN |= {"reward_margin": "margin", "accuracy": "accuracy"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Metrics:
    """One optimizer step of the whole run. Seconds; None is: not known."""

    step: int
    loss: float
    lr: float | None
    grad_norm: float | None
    dt: float
    dtf: float | None
    dtb: float | None
    samples_per_second: float
    samples_per_second_per_gpu: float
    tokens_per_second: float
    tokens_per_second_per_gpu: float
    mfu: float | None  # 0 to 1
    eta_seconds: float
    task: dict[str, float] = field(default_factory=dict)  # the task's own figures by name
    of_images: bool = False  # whether samples are images, and tokens the positions of their latents

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def figures(self) -> dict[str, float]:
        """Everything that is known, flat, for a tracker."""
        values = {
            k: v
            for k, v in self.to_dict().items()
            if v is not None and k not in ("step", "task", "of_images")
        }
        return values | self.task


def tokens_of_steps(data: Prepared) -> list[int]:
    """Tokens that go through the model in each step, over all processes, padding not counted."""
    info = data.info
    drawn = data.row_lengths[data.order[: info.total_steps * info.global_batch_size]]
    counts: list[int] = drawn.reshape(info.total_steps, info.global_batch_size).sum(axis=1).tolist()
    return counts


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """How fast one optimizer step of the whole run was."""

    tokens_per_second: float  # of all processes of all nodes together
    tokens_per_second_per_gpu: float  # on CPUs: per process
    mfu: float | None  # 0 to 1; None: the GPU's peak is not known


def speed_of(tokens: float, seconds: float, *, world_size: int, plan: Plan | None) -> Speed:
    """The speed of one step: the only place where it is worked out, for terminal, trackers and cards.

    Parameters
    ----------
    tokens:
        That went through the model in this step, over all ``world_size`` processes, padding not counted.
    seconds:
        That the step took.
    plan:
        Whose model and GPU give MFU; None where nothing was planned.
    """
    rate = tokens / seconds if seconds > 0 else 0.0
    peak = plan.prediction.peak_flops_per_gpu if plan else None
    return Speed(
        tokens_per_second=rate,
        tokens_per_second_per_gpu=rate / world_size,
        mfu=rate * plan.prediction.flops_per_token / (world_size * peak) if plan and peak else None,
    )


def time_left(training: float, *, trained: float, evaluated: float) -> float:
    """Seconds until the end: of training, and of evaluations as often and as long as so far."""
    return training * (1 + evaluated / trained) if trained > 0 else training


def median(values: Sequence[float]) -> float | None:
    """The upper median; None of nothing."""
    return sorted(values)[len(values) // 2] if values else None


class Meter:
    """Turns rank 0's steps into :class:`Metrics`. "Per GPU" is per process on CPUs."""

    def __init__(self, plan: Plan, tokens: Sequence[int]) -> None:
        self._plan = plan
        self._tokens = tokens
        self._seconds: list[float] = []
        self._evaluations: dict[int, float] = {}  # seconds, by the step before

    def add(self, event: Event) -> Metrics | None:
        if isinstance(event, Evaluated) and event.loss is not None:
            self._evaluations[event.step] = event.seconds
        if not isinstance(event, Step) or event.loss is None:
            return None
        self._seconds.append(event.dt)
        recent = sorted(self._seconds[-20:])
        world = self._plan.layout.world_size
        samples_per_second = self._plan.layout.global_batch_size / event.dt
        tokens = self._tokens[event.step - 1] if event.all_tokens is None else event.all_tokens
        speed = speed_of(tokens, event.dt, world_size=world, plan=self._plan)
        return Metrics(
            step=event.step,
            loss=event.loss,
            lr=event.lr,
            grad_norm=event.grad_norm,
            dt=event.dt,
            dtf=event.dtf,
            dtb=event.dtb,
            samples_per_second=samples_per_second,
            samples_per_second_per_gpu=samples_per_second / world,
            tokens_per_second=speed.tokens_per_second,
            tokens_per_second_per_gpu=speed.tokens_per_second_per_gpu,
            mfu=speed.mfu,
            eta_seconds=time_left(
                recent[len(recent) // 2] * (len(self._tokens) - event.step),
                trained=sum(self._seconds),
                evaluated=sum(self._evaluations.values()),
            ),
            task=event.metrics or {},
            of_images=self._plan.task == IMAGE_TASK,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """A finished run in a few figures; the steps' medians leave out the first, which warms up."""

    steps: int
    first_loss: float
    last_loss: float
    step_seconds: float
    tokens_per_second: float
    tokens_per_second_per_gpu: float
    samples_per_second: float
    mfu: float | None


def summarise(metrics: Sequence[Metrics]) -> Summary:
    """Medians over the steps; raises ValueError where no step was made."""
    if not metrics:
        raise ValueError("no step was made")
    steady = metrics[1:] or metrics

    def typical(values: list[float]) -> float:
        return median(values) or 0.0

    return Summary(
        steps=metrics[-1].step,
        first_loss=metrics[0].loss,
        last_loss=metrics[-1].loss,
        step_seconds=typical([m.dt for m in steady]),
        tokens_per_second=typical([m.tokens_per_second for m in steady]),
        tokens_per_second_per_gpu=typical([m.tokens_per_second_per_gpu for m in steady]),
        samples_per_second=typical([m.samples_per_second for m in steady]),
        mfu=median([m.mfu for m in steady if m.mfu is not None]),
    )


def step_line(metrics: Metrics, total_steps: int, memory_peak_bytes: int | None = None) -> str:
    """One line for the terminal: first what Metaflow's 65 signs before it leave room for on 120 columns."""
    parts = [f"step {metrics.step}/{total_steps}", f"loss {metrics.loss:.4f}"]
    if metrics.of_images:
        parts.append(f"{metrics.samples_per_second:,.2f} images/s")
    else:
        parts.append(f"{metrics.tokens_per_second:,.0f} tok/s")
    parts.append(f"eta {duration(metrics.eta_seconds)}")
    parts += [f"{SHOWN[name]} {value:.3f}" for name, value in metrics.task.items() if name in SHOWN]
    if memory_peak_bytes is not None:
        parts.append(f"{memory_peak_bytes / GIB:.1f} GiB")
    if metrics.lr is not None:
        parts.append(f"lr {metrics.lr:.2e}")
    if metrics.grad_norm is not None:
        parts.append(f"grad {metrics.grad_norm:.2f}")
    parts.append(f"dt {_times(metrics)}")
    if metrics.tokens_per_second != metrics.tokens_per_second_per_gpu and not metrics.of_images:
        parts.append(f"{metrics.tokens_per_second_per_gpu:,.0f} tok/s each")
    if metrics.mfu is not None:
        parts.append(f"MFU {metrics.mfu:.1%}")
    return "  ".join(parts)


def _times(metrics: Metrics) -> str:
    split = [f"{name} {value:.2f}" for name, value in (("f", metrics.dtf), ("b", metrics.dtb)) if value]
    return f"{metrics.dt:.2f}s" + (f" ({', '.join(split)})" if split else "")


def duration(seconds: float) -> str:
    """ "1:02:03", "2:03" or "0:07"."""
    whole = math.ceil(seconds)
    hours, minutes = whole // 3600, whole % 3600 // 60
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"


def dist_lines(ranks: Sequence[DistInfo]) -> list[str]:
    """The distributed-information block that opens a run."""
    first = ranks[0]
    hosts = sorted({rank.host for rank in ranks})
    lines = [
        f"engine {first.engine}, backend {first.backend}, world {first.world_size}, "
        f"scheduler {first.scheduler}, host{'s' if len(hosts) > 1 else ''} {', '.join(hosts)}"
    ]
    return lines + [
        f"  rank {rank.rank} (node {rank.node}, local {rank.local_rank}): {rank.device}, pid {rank.pid}"
        for rank in sorted(ranks, key=lambda rank: rank.rank)
    ]
