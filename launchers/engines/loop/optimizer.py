"""The optimizer and the schedule of the learning rate: torch's own."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch.optim.lr_scheduler import LambdaLR

from launchers.gang.job import TrainJob
from launchers.settings import Settings


def build(job: TrainJob, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """torch's own, so that nothing has to be compiled; its fused AdamW is native on GPUs and on CPUs."""
    settings = job.settings.optimizer
    lr = peak_lr(job.settings)
    if settings.name == "sgd":
        return torch.optim.SGD(parameters, lr=lr, momentum=0.9, weight_decay=settings.weight_decay)
    return torch.optim.AdamW(
        parameters,
        lr=lr,
        betas=settings.betas,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        fused=True,
    )


def peak_lr(settings: Settings) -> float:
    if settings.optimizer.lr == "auto":
        raise ValueError("optimizer.lr is still auto: it has to be resolved before the job is written.")
    return settings.optimizer.lr


def lr_factor(settings: Settings, total_steps: int) -> Callable[[int], float]:
    """Share of the peak learning rate that a step (0 is the first) uses.

    The same as torchtune's get_cosine_schedule_with_warmup (and thereby as transformers'): linear from
    0 over the warm-up, then the chosen shape, which reaches 0 one step after the last.
    """
    warmup, name = settings.schedule.warmup_steps, settings.schedule.name

    def factor(step: int) -> float:
        if step < warmup:
            return step / max(1, warmup)
        progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
        if name == "cosine":
            return max(0.0, 0.5 * (1.0 + math.cos(math.pi * progress)))
        return 1.0 - progress if name == "linear" else 1.0

    return factor


def schedule(job: TrainJob, done: int = 0) -> Callable[[torch.optim.Optimizer], LambdaLR]:
    """What makes the schedule of an optimizer; ``done``: steps of the run that it begins after."""
    factor = lr_factor(job.settings, job.total_steps)
    return lambda optimizer: LambdaLR(optimizer, lambda step: factor(step + done))
