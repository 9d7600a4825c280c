"""Step-level checkpoints of one process; those of several are tested by training."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from launchers.engines.torchtune import checkpoint as torchtune_checkpoint  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # as torchtune's engine does


def make(seed: int, lr: float = 0.1) -> tuple[torch.nn.Sequential, torch.optim.Optimizer]:
    """Create a model with a frozen and a trained layer."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
    model[0].requires_grad_(False)
    return model, torch.optim.AdamW(model.parameters(), lr=lr)


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(3, 4)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_training_resumes_bit_for_bit(tmp_path: Path) -> None:
    model, optimizer = make(0)
    step(model, optimizer)
    torchtune_checkpoint.save(tmp_path, model, [optimizer])
    step(model, optimizer)
    second_model, other = make(0)
    torchtune_checkpoint.load(tmp_path, second_model, [other])
    assert torchtune_checkpoint.load_generators(tmp_path)
    step(second_model, other)
    for old, new in zip(model.parameters(), second_model.parameters(), strict=True):
        assert torch.equal(old, new)


def test_frozen_weights_are_not_in_a_checkpoint(tmp_path: Path) -> None:
    model, optimizer = make(0)
    step(model, optimizer)
    torchtune_checkpoint.save(tmp_path, model, [optimizer])
    second_model, other = make(1)
    frozen = second_model[0].weight.clone()
    torchtune_checkpoint.load(tmp_path, second_model, [other])
    assert torch.equal(second_model[0].weight, frozen)
    assert torch.equal(second_model[1].weight, model[1].weight)


def test_a_resumed_run_takes_hyperparameters_from_the_job_not_from_the_checkpoint(tmp_path: Path) -> None:
    model, optimizer = make(0, lr=0.1)
    step(model, optimizer)
    torchtune_checkpoint.save(tmp_path, model, [optimizer])
    second_model, other = make(0, lr=0.5)
    torchtune_checkpoint.load(tmp_path, second_model, [other])
    assert other.param_groups[0]["lr"] == 0.5


def test_a_failed_write_names_the_rank_and_keeps_the_os_error_as_its_cause(tmp_path: Path) -> None:
    model, optimizer = make(0)
    (tmp_path / "__0_0.distcp").mkdir()
    with pytest.raises(RuntimeError, match="rank 0 could not write") as caught:
        torchtune_checkpoint.save(tmp_path, model, [optimizer])
    assert isinstance(caught.value.__cause__, OSError)


def test_generator_states_are_not_loaded_if_the_checkpoint_has_none(tmp_path: Path) -> None:
    assert not torchtune_checkpoint.load_generators(tmp_path)
