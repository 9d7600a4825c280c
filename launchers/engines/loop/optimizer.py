"""The optimizer and the schedule of the learning rate: torch's own."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch.optim.lr_scheduler import LambdaLR

from launchers.engines._schedule import lr_factor
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


def schedule(job: TrainJob, done: int = 0) -> Callable[[torch.optim.Optimizer], LambdaLR]:
    """What makes the schedule of an optimizer; ``done``: steps of the run that it begins after."""
    factor = lr_factor(job.settings.schedule, job.total_steps)
    return lambda optimizer: LambdaLR(optimizer, lambda step: factor(step + done))
