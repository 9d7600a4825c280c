"""Checkpoints from which FSDP2 can resume."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import state_dict_saver

from launchers.engines.fsdp2 import checkpoint
from launchers.engines.loop.moving_average import MovingAverage
from launchers.engines.loop.written_by import WrittenBy
from tests.launchers.engines.loop import runs


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # runs have a process group
def test_weights_optimizer_states_and_moving_averages_are_restored(tmp_path: Path) -> None:
    job = runs.make_job(
        tmp_path, tmp_path, tmp_path, steps=4, engine="fsdp2", sharding="fsdp", resume_dir=tmp_path
    )
    WrittenBy.of(job).write(tmp_path)

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
