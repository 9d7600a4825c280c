"""Checkpoints from which FSDP2 can resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import state_dict_saver

from estimator.errors import UserError
from launchers.engines.fsdp2 import checkpoint
from launchers.engines.loop.moving_average import MovingAverage
from launchers.gang.job import TrainJob
from tests.launchers.engines.loop import runs


def job_from(folder: Path, **values: Any) -> TrainJob:
    """Return a job that resumes from a checkpoint written by a run with these values."""
    written = {"engine": "fsdp2", "method": "full", "precision": "fp32", "optimizer": "adamw"}
    (folder / "engine.json").write_text(json.dumps(written | values))
    return runs.make_job(folder, folder, folder, steps=4, engine="fsdp2", sharding="fsdp", resume_dir=folder)


@pytest.mark.parametrize("values", [{"method": "lora"}, {"precision": "bf16"}, {"optimizer": "sgd"}])
def test_a_checkpoint_of_another_kind_of_run_is_refused(tmp_path: Path, values: dict[str, str]) -> None:
    with pytest.raises(UserError, match=next(iter(values.values()))):
        checkpoint._check(job_from(tmp_path, **values))


def test_a_checkpoint_of_another_engine_is_refused(tmp_path: Path) -> None:
    job = job_from(tmp_path)
    (tmp_path / "engine.json").write_text(json.dumps({"stage": 2, "world_size": 2}))  # DeepSpeed's
    with pytest.raises(UserError, match="FSDP2"):
        checkpoint._check(job)
    (tmp_path / "engine.json").unlink()
    with pytest.raises(UserError, match="not a whole checkpoint"):
        checkpoint._check(job)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # runs have a process group
def test_weights_optimizer_states_and_moving_averages_are_restored(tmp_path: Path) -> None:
    job = job_from(tmp_path)

    def build_state(steps: int) -> tuple[torch.nn.Module, torch.optim.Optimizer, MovingAverage]:
        network = torch.nn.Linear(3, 2)
        optimizer = torch.optim.AdamW(network.parameters(), lr=0.5)
        average = MovingAverage(network.named_parameters(), 0.5)
        for _ in range(steps):
            network(torch.ones(1, 3)).sum().backward()
            optimizer.step()
            average.update()
        return network, optimizer, average

    network, optimizer, average = build_state(3)
    scaler = torch.amp.GradScaler(enabled=False)
    saved = checkpoint._state(network, [optimizer], average, scaler)
    state_dict_saver.save(saved, checkpoint_id=str(tmp_path / checkpoint.FILES))
    loaded_states = build_state(0)
    checkpoint.restore(loaded_states[0], [loaded_states[1]], loaded_states[2], scaler, job)
    for name, parameter in network.named_parameters():
        other = dict(loaded_states[0].named_parameters())[name]
        assert torch.equal(parameter, other)
        assert torch.equal(optimizer.state[parameter]["exp_avg"], loaded_states[1].state[other]["exp_avg"])
        assert torch.equal(average.weights[name], loaded_states[2].weights[name])
        assert not torch.equal(average.weights[name], parameter)
    assert loaded_states[1].param_groups[0]["lr"] == job.settings.optimizer.lr
