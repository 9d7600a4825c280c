"""Metrics of a run, computed from the ranks' telemetry.

dt, dtf, dtb: duration in seconds of a step, of its forward passes and of its backward passes. MFU (model
FLOPs utilization): tokens/s times the model's FLOPs per token (without recomputation), divided by the GPUs'
dense peak FLOPS (Chowdhery et al. 2022, PaLM, appendix B); None if that peak is unknown.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from estimator.formatting import format_clock
from estimator.plan import GIB
from launchers.dataset.prepared import Prepared
from launchers.report.telemetry import DistInfo

# Task-specific figures shown in the terminal line of a step, with their labels
SHOWN = {"reward": "reward", "kl": "KL", "reward_margin": "margin", "accuracy": "accuracy"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Metrics:
    """Metrics of one optimizer step of the whole run. Times in seconds; None: unknown."""

    step: int
    loss: float | None  # None on a node without rank 0
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
    eta_seconds: float | None  # None: unknown number of steps
    task: dict[str, float] = field(default_factory=dict)  # task-specific figures by name
    is_image_run: bool = False  # whether samples are images; tokens are then positions of latents

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def figures(self) -> dict[str, float]:
        """Return the known figures as a flat mapping for trackers."""
        omitted = ("step", "task", "is_image_run")
        values = {k: v for k, v in self.to_dict().items() if v is not None and k not in omitted}
        return values | self.task


def tokens_of_steps(data: Prepared) -> list[int]:
    """Count the tokens that go through the model in each step, over all processes, without padding."""
    info = data.info
    lengths = data.row_lengths[data.order[: info.total_steps * info.global_batch_size]]
    counts: list[int] = lengths.reshape(info.total_steps, info.global_batch_size).sum(axis=1).tolist()
    return counts


def median(values: Sequence[float]) -> float | None:
    """Return the median, of an even count the upper one; None if there are no values."""
    return sorted(values)[len(values) // 2] if values else None


def typical(metrics: Sequence[Metrics], figure: Callable[[Metrics], float | None]) -> float | None:
    """Return the median of a figure over the steps; the first step counts only if there is no other."""
    values = [figure(step) for step in metrics[1:] or metrics]
    return median([value for value in values if value is not None])


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """Key figures of a finished run; medians without the first step, which includes warm-up."""

    steps: int
    first_loss: float | None
    last_loss: float | None
    step_seconds: float
    tokens_per_second: float
    tokens_per_second_per_gpu: float
    samples_per_second: float
    mfu: float | None


def summarize(metrics: Sequence[Metrics]) -> Summary:
    """Summarize a run's steps by medians; raises ValueError if there are none."""
    if not metrics:
        raise ValueError("no step was trained")
    return Summary(
        steps=metrics[-1].step,
        first_loss=metrics[0].loss,
        last_loss=metrics[-1].loss,
        step_seconds=typical(metrics, lambda step: step.dt) or 0.0,
        tokens_per_second=typical(metrics, lambda step: step.tokens_per_second) or 0.0,
        tokens_per_second_per_gpu=typical(metrics, lambda step: step.tokens_per_second_per_gpu) or 0.0,
        samples_per_second=typical(metrics, lambda step: step.samples_per_second) or 0.0,
        mfu=typical(metrics, lambda step: step.mfu),
    )


def step_line(metrics: Metrics, total_steps: int, memory_peak_bytes: int | None = None) -> str:
    """Format a step as one line, most important figures first: Metaflow's prefix takes 65 of 120 columns."""
    parts = [f"step {metrics.step}/{total_steps}", f"loss {metrics.loss:.4f}"]
    if metrics.is_image_run:
        parts.append(f"{metrics.samples_per_second:,.2f} images/s")
    else:
        parts.append(f"{metrics.tokens_per_second:,.0f} tok/s")
    if metrics.eta_seconds is not None:
        parts.append(f"eta {format_clock(metrics.eta_seconds)}")
    parts += [f"{SHOWN[name]} {value:.3f}" for name, value in metrics.task.items() if name in SHOWN]
    if memory_peak_bytes is not None:
        parts.append(f"{memory_peak_bytes / GIB:.1f} GiB")
    if metrics.lr is not None:
        parts.append(f"lr {metrics.lr:.2e}")
    if metrics.grad_norm is not None:
        parts.append(f"grad norm {metrics.grad_norm:.2f}")
    times = {"fwd": metrics.dtf, "bwd": metrics.dtb}
    passes = [f"{name} {value:.2f}" for name, value in times.items() if value]
    parts.append(f"{metrics.dt:.2f} s/step" + (f" ({', '.join(passes)})" if passes else ""))
    if metrics.tokens_per_second != metrics.tokens_per_second_per_gpu and not metrics.is_image_run:
        parts.append(f"{metrics.tokens_per_second_per_gpu:,.0f} tok/s/GPU")
    if metrics.mfu is not None:
        parts.append(f"MFU {metrics.mfu:.1%}")
    return "  ".join(parts)


def dist_lines(ranks: Sequence[DistInfo]) -> list[str]:
    """Format the placement of the ranks, printed at the start of a run."""
    first = ranks[0]
    hosts = sorted({rank.host for rank in ranks})
    lines = [
        f"engine {first.engine}, backend {first.backend}, world size {first.world_size}, "
        f"scheduler {first.scheduler}, host{'s' if len(hosts) > 1 else ''} {', '.join(hosts)}"
    ]
    return lines + [
        f"  rank {rank.rank} (node {rank.node}, local {rank.local_rank}): {rank.device}, pid {rank.pid}"
        for rank in sorted(ranks, key=lambda rank: rank.rank)
    ]
