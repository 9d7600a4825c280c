"""The optimizer and its schedule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from launchers.engines.loop import optimizer
from tests.launchers.engines.loop import runs


def test_the_learning_rate_follows_the_schedule_and_the_steps_of_the_job() -> None:
    job = runs.make_job(
        Path(), Path(), Path(), steps=10, settings={"schedule": {"name": "linear", "warmup_steps": 2}}
    )
    stepped = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    schedule, rates = optimizer.schedule(job)(stepped), []
    for _ in range(4):
        rates += schedule.get_last_lr()
        stepped.step()
        schedule.step()
    assert rates == [0.0, 0.5, 1.0, 0.875]


def test_muon_optimizes_the_matrices_of_blocks_and_adamw_all_other_parameters() -> None:
    job = runs.make_job(
        Path(), Path(), Path(), steps=1, engine="fsdp2", settings={"optimizer": {"name": "muon", "lr": 1e-2}}
    )
    shapes = {
        "model.embed_tokens.weight": (8, 4),
        "model.layers.0.mlp.up_proj.weight": (6, 4),
        "model.layers.0.mlp.up_proj.bias": (6,),
        "model.norm.weight": (4,),
        "lm_head.weight": (8, 4),
    }
    named = {name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in shapes.items()}
    muon, adamw = optimizer.build(job, named.items())
    assert isinstance(muon, torch.optim.Muon)
    assert [id(p) for p in muon.param_groups[0]["params"]] == [id(named["model.layers.0.mlp.up_proj.weight"])]
    assert len(adamw.param_groups[0]["params"]) == len(shapes) - 1


ENDS: dict[tuple[str, str], dict[str, Any]] = {
    ("deepspeed", "adamw8bit"): {"sharding": "zero2"},
    ("deepspeed", "paged-adamw8bit"): {"sharding": "zero3"},
    ("deepspeed", "paged-adamw"): {"sharding": "zero1"},
    ("fsdp2", "adamw8bit"): {"sharding": "fsdp"},
    ("fsdp2", "muon"): {"sharding": "fsdp"},
    ("fsdp2", "adafactor"): {"sharding": "none", "world": 1, "micro": 4},
}
EVERY_CHANGE = [("deepspeed", "paged-adamw8bit"), ("fsdp2", "adafactor")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "name"),
    [pytest.param(*end, marks=[] if end in EVERY_CHANGE else pytest.mark.nightly) for end in ENDS],
)
def test_an_optimizer_learns_and_resumes_bit_by_bit(tmp_path: Path, engine: str, name: str) -> None:
    model = runs.make_model(tmp_path / "model")
    data = runs.make_data(tmp_path / "data", runs.documents(8), batch=4, steps=6)
    settings = {"optimizer": {"name": name, "lr": 3e-2 if name == "adafactor" else 1e-2}}
    job = runs.make_job(
        tmp_path / "work",
        model,
        data,
        steps=6,
        engine=engine,
        settings=settings,
        checkpoint_every=3,
        **ENDS[engine, name],
    )
    losses = runs.losses(runs.run(job))
    assert losses[-1] < losses[0] - 0.1
    resumed = runs.resumed(job, tmp_path / "again", 3)
    assert runs.losses(runs.run(resumed)) == losses[3:]
