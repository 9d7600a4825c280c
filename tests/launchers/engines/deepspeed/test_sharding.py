"""DeepSpeed in gangs of two processes on CPUs.

Methods, resuming and exports with ZeRO 0, 2 and 3: test_engines_by_method.py and loop/test_families.py.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from launchers.gang.job import TrainJob
from launchers.report import telemetry
from tests.launchers.engines import counting
from tests.launchers.engines.loop import runs

pytestmark = pytest.mark.slow
STEPS = 6
DOCUMENTS = 8  # each is seen three times
CLOSE = 2e-6  # relative; the order of a sum of fp32 differs between layouts


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, model: Path, data: Path) -> TrainJob:
    """A finished run with two processes, ZeRO 2 and full training, for comparison."""
    job = runs.make_job(tmp_path_factory.mktemp("plain"), model, data, steps=STEPS, checkpoint_every=3)
    runs.run(job)
    return job


def first_loss(model: Path) -> float:
    """Return the mean loss of the documents of the first step."""
    return runs.mean_loss(runs.load(model), runs.documents(4))


def test_each_step_reports_loss_norm_rate_and_times(plain: TrainJob) -> None:
    steps = runs.steps(plain)
    losses = runs.losses(steps)
    assert losses[0] == pytest.approx(first_loss(plain.model_dir), rel=CLOSE)
    assert losses[-1] < losses[0] - 0.2
    assert [step.lr for step in steps][:3] == pytest.approx([0.0, 0.005, 0.01])
    for step in steps:
        assert (step.grad_norm or 0) > 0
        assert step.samples == 2
        assert 0 < (step.dtf or 0) + (step.dtb or 0) < step.dt
    assert [step.loss for step in runs.steps(plain, rank=1)] == [None] * STEPS


def test_phases_are_reported_in_order(tmp_path: Path, model: Path, data: Path) -> None:
    job = runs.make_job(tmp_path, model, data, steps=2, world=1, micro=4, checkpoint_every=1)
    runs.run(job)
    events = list(telemetry.Follower(job.telemetry_dir).poll())
    phases = [(event.name, event.step) for event in events if isinstance(event, telemetry.Phase)]
    assert phases == [("load", 0), ("train", 0), ("checkpoint", 1), ("train", 1), ("save", 2), ("done", 2)]
    assert runs.read_json(job.work_dir / "engine" / "deepspeed.json")["zero_optimization"]["stage"] == 2


@pytest.mark.parametrize(
    ("options", "method"),
    [
        ({"sharding": "zero3", "precision": "bf16", "activation_checkpointing": True}, "full"),
        pytest.param({"sharding": "zero0", "precision": "bf16"}, "full", marks=pytest.mark.nightly),
        ({"sharding": "zero2", "offload": "cpu"}, "lora"),
    ],
    ids=["bf16-zero3-checkpointing", "bf16-zero0", "offload-lora"],
)
def test_training_learns_with_each_precision_offload_and_activation_checkpointing(
    tmp_path: Path, model: Path, data: Path, options: dict[str, Any], method: str
) -> None:
    job = runs.make_job(tmp_path, model, data, steps=STEPS, settings={"method": method}, **options)
    losses = runs.losses(runs.run(job))
    assert losses[0] == pytest.approx(first_loss(model), rel=1e-3)
    assert losses[-1] < losses[0] - 0.05


def test_packing_and_accumulation_do_not_change_the_loss(tmp_path: Path, plain: TrainJob) -> None:
    """Two documents per row, or twice the micro batches, give the same loss."""
    documents = runs.documents(DOCUMENTS)
    rows = [runs.joined(documents[i : i + 2]) for i in range(0, DOCUMENTS, 2)]
    packed = runs.make_data(tmp_path / "packed", rows, batch=2, steps=STEPS)
    together = runs.make_job(tmp_path / "work", plain.model_dir, packed, steps=STEPS, micro=1)
    accumulated = runs.make_job(
        tmp_path / "two", plain.model_dir, plain.data_dir, steps=STEPS, micro=1, accumulation=2
    )
    expected = pytest.approx(runs.losses(runs.steps(plain)), rel=1e-5)
    assert runs.losses(runs.run(together)) == expected
    assert runs.losses(runs.run(accumulated)) == expected


@pytest.mark.parametrize(("sharding", "reduced_in_each_pass"), [("zero1", False), ("zero2", True)])
def test_zero1_reduces_gradients_in_the_last_pass_of_a_step_and_zero2_in_each(
    tmp_path: Path, model: Path, data: Path, sharding: str, reduced_in_each_pass: bool
) -> None:
    def calls(accumulation: int) -> Counter[str]:
        job = runs.make_job(
            tmp_path / str(accumulation),
            model,
            data,
            steps=STEPS,
            micro=2 // accumulation,
            accumulation=accumulation,
            sharding=sharding,
        )
        return counting.calls_of(job)

    one, two = calls(1), calls(2)
    more = counting.named(two, "allreduce") - counting.named(one, "allreduce")
    assert more == (STEPS if reduced_in_each_pass else 0)
    assert two["fetched"] == one["fetched"], "a pass does not wait for the device"
    assert two["branches"] - one["branches"] == STEPS, "by transformers, whether rows are packed"


def test_a_run_resumes_on_another_number_of_processes(tmp_path: Path, plain: TrainJob) -> None:
    assert [path.name for path in plain.checkpoints_dir.iterdir()] == ["step-00000003"]  # none after the last
    assert len(list(plain.checkpoint_dir(3).glob("rank-*.json"))) == 2
    alone = runs.resumed(plain, tmp_path, 3, processes_per_node=1, accumulation=2)
    assert runs.losses(runs.run(alone)) == pytest.approx(runs.losses(runs.steps(plain))[3:], rel=1e-5)
    assert not (alone.work_dir / "engine" / "resume").exists()


def test_dropout_resumes_from_its_saved_random_state(tmp_path: Path, plain: TrainJob) -> None:
    job = runs.make_job(
        tmp_path / "whole",
        plain.model_dir,
        plain.data_dir,
        steps=4,
        world=1,
        micro=4,
        settings={"method": "lora", "lora": {"dropout": 0.5}},
        checkpoint_every=2,
    )
    losses = runs.losses(runs.run(job))
    assert runs.losses(runs.run(runs.resumed(job, tmp_path / "resumed", 2))) == losses[2:]
