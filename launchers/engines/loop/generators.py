"""Random generators of a rank: seeded, kept in a checkpoint, and put back."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from launchers.gang.job import TrainJob
from launchers.gang.rank import RankEnv


def seed(number: int) -> None:
    """Seed all three."""
    random.seed(number)
    np.random.seed(number % 2**32)
    torch.manual_seed(number)


def seed_rank(job: TrainJob, env: RankEnv) -> None:
    """Seed for training, each rank its own way: what dropout takes."""
    seed(job.settings.seed + env.rank + job.start_step * job.plan.layout.world_size)


def save(folder: Path, env: RankEnv) -> None:
    """Write a rank's generators into a checkpoint's folder: random-00000.pt."""
    torch.save(_states(), _file(folder, env))


def restore(folder: Path, env: RankEnv) -> None:
    """Put back what :func:`save` wrote; nothing where this rank wrote none, as in a smaller run."""
    path = _file(folder, env)
    if not path.is_file():
        return
    _put_back(torch.load(path, weights_only=False))


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Whatever is drawn in here, afterwards they go on as if nothing had been."""
    states = _states()
    try:
        yield
    finally:
        _put_back(states)


def _states() -> dict[str, Any]:
    states: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(),
        "python": random.getstate(),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _put_back(states: dict[str, Any]) -> None:
    torch.set_rng_state(states["torch"])
    np.random.set_state(states["numpy"])
    random.setstate(states["python"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def _file(folder: Path, env: RankEnv) -> Path:
    return folder / f"random-{env.rank:05d}.pt"
