"""Random generators of a rank: seeding, saving to a checkpoint, restoring."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from launchers.engines.tensors_only import tensors_only
from launchers.gang.job import TrainJob
from launchers.gang.rank import RankEnv


def seed(number: int) -> None:
    """Seed Python's, NumPy's and torch's generators."""
    random.seed(number)
    np.random.seed(number % 2**32)
    torch.manual_seed(number)


def seed_rank(job: TrainJob, env: RankEnv) -> None:
    """Seed the generators for training, differently on each rank, because dropout uses them."""
    seed(job.settings.seed + env.rank + job.start_step * job.plan.layout.world_size)


def save(folder: Path, env: RankEnv) -> None:
    """Write a rank's generators into a checkpoint's folder: random-00000.pt."""
    torch.save(_states(), _file(folder, env))


def restore(folder: Path, env: RankEnv) -> None:
    """Restore the state from :func:`save`; do nothing if this rank has no file, as after a smaller run."""
    path = _file(folder, env)
    if not path.is_file():
        return
    with tensors_only(folder):
        states = torch.load(path, weights_only=True)
    _set_states(states)


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Restore the state of the generators after the block, so that its random draws have no effect."""
    states = _states()
    try:
        yield
    finally:
        _set_states(states)


def _states() -> dict[str, Any]:
    """Return the state as tensors and plain values, so that its file can be read without executing code."""
    numpy = np.random.get_state(legacy=False)
    keys = torch.from_numpy(numpy["state"]["key"].astype(np.int64))
    states: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": numpy | {"state": numpy["state"] | {"key": keys}},
        "python": random.getstate(),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _set_states(states: dict[str, Any]) -> None:
    torch.set_rng_state(states["torch"])
    numpy = states["numpy"]
    keys = numpy["state"]["key"].numpy().astype(np.uint32)
    np.random.set_state(numpy | {"state": numpy["state"] | {"key": keys}})
    random.setstate(states["python"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def _file(folder: Path, env: RankEnv) -> Path:
    return folder / f"random-{env.rank:05d}.pt"
