"""FSDP2's checkpoints, by torch's distributed checkpoint (DCP): for any number of processes.

A checkpoint folder holds ``engine.json`` (written_by.py), ``engine/`` (DCP's files: a part from every
rank, and ``.metadata`` from rank 0) and ``random-00000.pt`` (a rank's generators).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from launchers.engines.loop import generators
from launchers.engines.loop.moving_average import MovingAverage
from launchers.engines.loop.written_by import WrittenBy, check_resumable
from launchers.engines.tensors_only import load_distributed
from launchers.gang.job import TrainJob
from launchers.gang.rank import RankEnv, mark_part_complete

FILES = "engine"


Optimizers = list[torch.optim.Optimizer]


def save(
    network: nn.Module,
    optimizers: Optimizers,
    average: MovingAverage | None,
    scaler: GradScaler,
    job: TrainJob,
    env: RankEnv,
    step: int,
) -> None:
    """Write this rank's part of the checkpoint of ``step``, and mark it complete."""
    folder = job.checkpoint_dir(step)
    folder.mkdir(parents=True, exist_ok=True)
    state_dict_saver.save(_state(network, optimizers, average, scaler), checkpoint_id=str(folder / FILES))
    generators.save(folder, env)
    if env.rank == 0:
        WrittenBy.of(job).write(folder)
    dist.barrier()
    mark_part_complete(folder, env, step)


def restore(
    network: nn.Module,
    optimizers: Optimizers,
    average: MovingAverage | None,
    scaler: GradScaler,
    job: TrainJob,
) -> None:
    """Restore weights, optimizer states, the weights' average and the loss scale from the checkpoint.

    Raises UserError for a checkpoint of another kind of run.
    """
    assert job.resume_dir is not None  # noqa: S101 - the caller has checked it
    check_resumable(job, job.resume_dir)
    state = _state(network, optimizers, average, scaler)
    load_distributed(state, job.resume_dir / FILES)
    set_model_state_dict(network, state["model"], options=StateDictOptions(strict=False))
    set_optimizer_state_dict(network, optimizers, state["optimizer"], options=_FLAT)
    if "scaler" in state:
        scaler.load_state_dict({name: value.item() for name, value in state["scaler"].items()})
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        rate = job.settings.optimizer.lr  # the schedule multiplies it
        group["lr"] = group["lr"].fill_(rate) if isinstance(group["lr"], torch.Tensor) else rate


_FLAT = StateDictOptions(flatten_optimizer_state_dict=True, ignore_frozen_params=True)


def _state(
    network: nn.Module, optimizers: Optimizers, average: MovingAverage | None, scaler: GradScaler
) -> dict[str, Any]:
    """Return trained parameters, optimizer states and moving average by parameter name, and the loss scale.

    Each rank returns its shards. On loading, DCP writes into the average's tensors in place.
    """
    state: dict[str, Any] = {} if average is None else {"average": average.weights}
    if scaler.is_enabled():
        state["scaler"] = {name: torch.tensor(value) for name, value in scaler.state_dict().items()}
    return state | {
        "model": get_model_state_dict(network, options=StateDictOptions(ignore_frozen_params=True)),
        "optimizer": get_optimizer_state_dict(network, optimizers, options=_FLAT),
    }
