"""Compiled blocks with the ZeRO stages that leave weights whole."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path

import pytest
import torch

from estimator.engines.automatic import COMPILED
from launchers import engines
from launchers.gang.job import TrainJob
from tests.launchers.engines import ranks
from tests.launchers.engines.loop import families, runs

pytestmark = pytest.mark.slow
STEPS = 3


def train_with_traced_blocks(job: TrainJob) -> None:
    """Train a rank with torch.compile's graphs, but without generating code for them.

    Fails if nothing was compiled, or if hooks break a block's graph.
    """
    if job.settings.compile:
        torch.compile = functools.partial(torch.compile, backend="aot_eager", fullgraph=True)  # type: ignore[assignment]
    engines.get(job.plan.engine).train(job)
    assert bool(torch._dynamo.utils.counters["stats"]["unique_graphs"]) == job.settings.compile


@pytest.mark.parametrize(
    ("stage", "method", "checkpointing", "world", "family"),
    [
        (2, "full", True, 2, "llama"),
        (0, "full", False, 1, "qwen3"),  # what a plan for one GPU has
        *(
            pytest.param(*cell, "llama", marks=pytest.mark.nightly)
            for cell in ((0, "full", False, 2), (1, "lora", True, 2), (2, "qlora", True, 2))
        ),
        *(
            pytest.param(*cell, 1, family, marks=pytest.mark.nightly)
            for family, cell in zip(
                COMPILED,
                itertools.cycle([(0, "full", True), (1, "lora", False), (2, "full", False)]),
                strict=False,
            )
        ),
    ],
)
def test_compiled_blocks_have_the_losses_of_eager_ones(
    tmp_path: Path, stage: int, method: str, checkpointing: bool, world: int, family: str
) -> None:
    model = tmp_path / "model"
    families.network(family, **families.repeated(family)).save_pretrained(model)
    documents = runs.documents(8)
    rows = [runs.joined(documents[i : i + 2]) for i in range(0, 8, 2)]
    data = runs.make_data(tmp_path / "data", rows, batch=4, steps=STEPS)
    losses = []
    for compiled in (False, True):
        job = runs.make_job(
            tmp_path / str(compiled),
            model,
            data,
            steps=STEPS,
            world=world,
            micro=1,
            accumulation=4 // world,
            precision="fp32" if world > 1 else "bf16-mixed",
            sharding=f"zero{stage}",
            activation_checkpointing=checkpointing,
            settings={"method": method, "compile": compiled},
        )
        done = ranks.train([job], limit_s=200, entry=f"{__name__}:{train_with_traced_blocks.__name__}")
        assert done.returncode == 0, done.stderr[-4000:]
        losses.append(runs.losses(runs.steps(job)))
    assert losses[1] == pytest.approx(losses[0], rel=2e-6)
    assert losses[0][-1] < losses[0][0]
