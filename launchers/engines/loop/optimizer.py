"""Optimizers of torch and (with fewer bits) bitsandbytes, and the learning rate schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from estimator.vocabulary import OPTIMIZERS
from launchers.engines._schedule import lr_factor
from launchers.gang.job import TrainJob

Named = Iterable[tuple[str, torch.nn.Parameter]]

# Embeddings and output layers, which Muon's author trains with AdamW (Keller Jordan 2024,
# https://kellerjordan.github.io/posts/muon)
_TABLES = ("embed_tokens", "wte", "embed_in", "word_embeddings", "lm_head", "embed_out", "score")


def build(job: TrainJob, named_parameters: Named) -> list[torch.optim.Optimizer]:
    """Build the optimizers of the trained parameters: one, or Muon for matrices and AdamW for the rest.

    torch's optimizers need no compiler; its fused AdamW has native kernels for GPUs and CPUs.
    """
    settings, named_parameters = job.settings.optimizer, list(named_parameters)
    parameters = [parameter for _, parameter in named_parameters]
    common: dict[str, Any] = {"lr": job.settings.optimizer.lr, "weight_decay": settings.weight_decay}
    if settings.name == "sgd":
        return [torch.optim.SGD(parameters, momentum=0.9, **common)]
    if settings.name == "adafactor":
        return [torch.optim.Adafactor(parameters, **common)]
    if settings.name == "adamw8bit" and job.plan.engine == "fsdp2":
        from torchao.optim import AdamW8bit

        return [AdamW8bit(parameters, betas=settings.betas, eps=settings.eps, **common)]
    if OPTIMIZERS[settings.name].bitsandbytes:
        import bitsandbytes

        kind = getattr(bitsandbytes.optim, OPTIMIZERS[settings.name].bitsandbytes)
        return [kind(parameters, betas=settings.betas, eps=settings.eps, **common)]
    if settings.name != "muon":
        return [_adamw(job, parameters)]
    matrices = [
        p for name, p in named_parameters if p.ndim == 2 and not any(table in name for table in _TABLES)
    ]
    matrix_ids = {id(matrix) for matrix in matrices}
    other_parameters = [parameter for parameter in parameters if id(parameter) not in matrix_ids]
    # Scale updates to the RMS of AdamW's, so that its learning rates apply (Liu et al. 2025,
    # arXiv:2502.16982, section 2.2)
    muon = torch.optim.Muon(matrices, adjust_lr_fn="match_rms_adamw", **common)
    return [muon, _adamw(job, other_parameters)] if other_parameters else [muon]


def _adamw(job: TrainJob, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    settings = job.settings.optimizer
    return torch.optim.AdamW(
        parameters,
        lr=job.settings.optimizer.lr,
        betas=settings.betas,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        fused=True,
    )


def schedule(job: TrainJob, steps_done: int = 0) -> Callable[[torch.optim.Optimizer], LambdaLR]:
    """Return a function that creates the schedule of an optimizer.

    ``steps_done``: steps of the run before the schedule starts.
    """
    factor = lr_factor(job.settings.schedule, job.total_steps)
    return lambda optimizer: LambdaLR(optimizer, lambda step: factor(step + steps_done))
