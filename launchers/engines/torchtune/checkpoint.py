"""Step-level checkpoints for torchtune's recipes, which themselves save only at the ends of epochs.

A checkpoint folder holds::

    .metadata            torch.distributed.checkpoint's map of all tensors; written by rank 0
    __R_0.distcp         rank R's shards of the trained weights and of the optimizer's states
    rng-RRRRR.pt         rank R's random generators

Each rank writes only its own files and reads what it needs from the files of all ranks, so no shared file
system is needed, and the world size may change. Frozen weights (LoRA's base) are not included: they are read
from the model folder.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict import _init_optim_state

from launchers.engines.tensors_only import load_distributed, tensors_only

Optimizers = list[torch.optim.Optimizer]

# Names that activation checkpointing and torch.compile put in front of a module's own.
_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")


def save(folder: Path, model: torch.nn.Module, optimizers: Optimizers) -> None:
    """Write this rank's part; returns when all ranks have written theirs."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(_generators(), _rng_file(folder))
    try:
        state_dict_saver.save(_tensors(model, optimizers), storage_writer=FileSystemWriter(folder))
    except CheckpointException as error:  # raised on every rank for the failures of all; no Exception
        rank, (failure, _) = next(iter(error.failures.items()))
        raise RuntimeError(f"rank {rank} could not write its part of {folder}: {failure}") from failure
    if dist.is_initialized():
        dist.barrier()


def load(folder: Path, model: torch.nn.Module, optimizers: Optimizers) -> None:
    """Load into the model and the optimizers in place; the optimizers keep their hyperparameters."""
    for optimizer in optimizers:
        groups = [
            {key: value for key, value in group.items() if key != "params"}
            for group in optimizer.param_groups
        ]
        _init_optim_state(optimizer)  # a step with zero gradients creates the states to fill
        for group, values in zip(optimizer.param_groups, groups, strict=True):
            group.update(values)
    tensors = _tensors(model, optimizers)
    load_distributed(tensors, folder)
    for name, states in _states(model, optimizers):
        for key in _integer_states(states):
            states[key] = int(tensors[f"optimizer.{name}.{key}"])


def load_generators(folder: Path) -> bool:
    """Restore this rank's random generators; False if the checkpoint has another world size."""
    path = _rng_file(folder)
    if not path.is_file():
        return False
    with tensors_only(folder):
        state = torch.load(path, weights_only=True)
    if state["world_size"] != _world_size():
        return False
    torch.set_rng_state(state["cpu"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    return True


def _generators() -> dict[str, Any]:
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    return {"world_size": _world_size(), "cpu": torch.get_rng_state(), "cuda": cuda}


def _rng_file(folder: Path) -> Path:
    return folder / f"rng-{dist.get_rank() if dist.is_initialized() else 0:05d}.pt"


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _states(model: torch.nn.Module, optimizers: Optimizers) -> Iterator[tuple[str, dict[str, Any]]]:
    """Iterate over each trained weight's plain name and optimizer states."""
    states = {parameter: state for optimizer in optimizers for parameter, state in optimizer.state.items()}
    for name, parameter in model.named_parameters():
        if parameter in states:
            yield plain_name(name), states[parameter]


def _integer_states(states: dict[str, Any]) -> list[str]:
    """Return the names of integer states, such as the step count of bitsandbytes."""
    return [key for key, value in states.items() if isinstance(value, int)]


def _tensors(model: torch.nn.Module, optimizers: Optimizers) -> dict[str, torch.Tensor]:
    """Return trained weights and optimizer states by name; DTensors if the model is sharded.

    torch.distributed.checkpoint's get_state_dict is not used: for QLoRA it first makes a dequantized copy of
    the complete base, which it then drops.
    """
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        tensors[f"model.{plain_name(name)}"] = parameter.detach()
    for name, states in _states(model, optimizers):
        tensors |= {
            f"optimizer.{name}.{key}": value
            for key, value in states.items()
            if isinstance(value, torch.Tensor)
        }
        tensors |= {f"optimizer.{name}.{key}": torch.tensor(states[key]) for key in _integer_states(states)}
    return tensors


def plain_name(name: str) -> str:
    """Return a parameter's name without the wrappers of activation checkpointing and torch.compile."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name
