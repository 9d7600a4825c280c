"""Evaluations during training, on every engine, with one process and two."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launchers import engines
from launchers.dataset.prepared import Prepared
from launchers.evaluation.held_out import scorer_of
from launchers.evaluation.loading import load_model
from launchers.gang.job import TrainJob
from launchers.models import tiny_llama
from launchers.report import telemetry
from launchers.report.telemetry import Evaluated
from tests.launchers.engines.loop import runs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

STEPS, BATCH, EVERY, HELD_OUT = 5, 4, 2, 7
SHARDINGS = {"torchtune": ("none", "fsdp"), "deepspeed": ("zero0", "zero3"), "fsdp2": ("none", "fsdp")}
Trained = Callable[..., TrainJob]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """``trained("fsdp2", 2)``: a run with evaluations, made once; ``every=None``: without evaluations."""
    folder = tmp_path_factory.mktemp("evaluation")
    model = tiny_llama.make(folder / "model")
    kinds = {"sft": runs.documents, "dpo": runs.pairs}
    for task, rows in kinds.items():
        data = runs.make_data(folder / task, rows(12), batch=BATCH, steps=STEPS)
        # of two processes with two rows each at once, one has less to do than the other
        runs.make_data(data / "heldout", rows(HELD_OUT, seed=5), batch=1, steps=HELD_OUT)

    @functools.cache
    def get(engine: str, world: int, every: int | None = EVERY, task: str = "sft") -> TrainJob:
        low_rank: dict[str, Any] = {"method": "lora", "task": task} if task == "dpo" else {}
        job = runs.make_job(
            folder / f"{engine}-{world}-{every}-{task}",
            model,
            folder / task,
            steps=STEPS,
            world=world,
            micro=BATCH // world,
            engine=engine,
            sharding=SHARDINGS[engine][world - 1],
            settings={"evaluation": {"every_steps": every}, **low_rank},
        )
        runs.run(job)
        return job

    return get


def events(job: TrainJob, rank: int = 0) -> list[Evaluated]:
    evaluated = telemetry.Follower(job.telemetry_dir).poll()
    done = [each for each in evaluated if isinstance(each, Evaluated) and each.loss is not None]
    return [each for each in done if each.rank == rank]


def curve(job: TrainJob, rank: int = 0) -> list[float]:
    evaluated = events(job, rank)
    assert [each.step for each in evaluated] == [2, 4, STEPS]
    return [each.loss for each in evaluated if each.loss is not None]


@pytest.mark.parametrize(
    "engine",
    ["fsdp2", *(pytest.param(engine, marks=pytest.mark.nightly) for engine in ("torchtune", "deepspeed"))],
)
def test_evaluations_change_no_bit_of_training(trained: Trained, engine: str) -> None:
    with_them, without = trained(engine, 2), trained(engine, 2, every=None)
    assert runs.losses(runs.steps(with_them)) == runs.losses(runs.steps(without))
    assert [step.grad_norm for step in runs.steps(with_them)] == [
        step.grad_norm for step in runs.steps(without)
    ]


def test_all_engines_and_numbers_of_processes_measure_the_same_loss_curve(trained: Trained) -> None:
    alone = curve(trained("fsdp2", 1))
    for engine in SHARDINGS:
        two = trained(engine, 2)
        assert curve(two) == pytest.approx(alone, rel=1e-4)
        assert curve(two, rank=1) == curve(two)  # to the last bit: ranks decide by it


def test_early_stopping_ends_all_ranks_and_keeps_the_best_step_as_a_checkpoint(
    trained: Trained, tmp_path: Path
) -> None:
    job = trained("torchtune", 2)
    evaluation = job.settings.evaluation.model_copy(
        # no loss is lower by so much than the first
        update={"every_steps": 1, "patience": 2, "min_delta": 100.0}
    )
    stopping = dataclasses.replace(
        job, work_dir=tmp_path, settings=job.settings.model_copy(update={"evaluation": evaluation})
    )
    runs.run(stopping)
    steps = [runs.steps(stopping, rank)[-1].step for rank in (0, 1)]
    assert steps == [3, 3]
    losses = {each.step: each.loss or 0.0 for each in events(stopping)}
    best = min(losses, key=lambda step: losses[step])
    kept_steps = sorted(int(path.name.removeprefix("step-")) for path in stopping.checkpoints_dir.iterdir())
    assert best in kept_steps or best == 3
    assert (stopping.output_dir.exists(), 3 in kept_steps) == ((True, False) if best == 3 else (False, True))


ROWS = {
    "pretrain": lambda count, seed=0: [runs.joined(runs.documents(2, seed + row)) for row in range(count)],
    "sft": runs.documents,
    "kto": runs.judged,
}


@pytest.mark.parametrize(
    ("task", "method"),
    [
        ("pretrain", "full"),
        ("kto", "lora"),
        ("sft", "adapter-v1"),
        pytest.param("orpo", "lora", marks=pytest.mark.nightly),
        pytest.param("simpo", "full", marks=pytest.mark.nightly),
        pytest.param("kto", "full", marks=pytest.mark.nightly),
        pytest.param("reward", "lora", marks=pytest.mark.nightly),
        pytest.param("sft", "adapter-v2", marks=pytest.mark.nightly),
    ],
)
def test_each_task_is_evaluated_in_training_with_the_scores_of_its_finished_model(
    tmp_path: Path, task: str, method: str
) -> None:
    model = runs.make_model(tmp_path / "model", "rewards" if task == "reward" else "llama")
    rows = ROWS.get(task, runs.pairs)
    data = runs.make_data(tmp_path / "data", rows(12), batch=BATCH, steps=STEPS)
    held_out = rows(HELD_OUT, seed=50)
    runs.make_data(data / "heldout", held_out, batch=1, steps=len(held_out))
    job = runs.make_job(
        tmp_path / "run",
        model,
        data,
        steps=STEPS,
        engine="fsdp2",
        sharding="fsdp",
        settings={"task": task, "method": method, "evaluation": {"every_steps": EVERY}},
    )
    job = runs.with_reference(job, tmp_path)
    runs.run(job)
    assert curve(job)[-1] < curve(job)[0]

    engines.get("fsdp2").collect(job, tmp_path / "out")
    finished = load_model(engines.result_of(tmp_path / "out"), model, "cpu", "fp32", job.settings)
    scorer = scorer_of(job.settings, Prepared(job.held_out_dir), 256)
    if task == "kto":
        scorer.score(load_model(model, model, "cpu", "fp32"))  # what it is compared with
    score = scorer.score(finished)
    assert score.loss == pytest.approx(curve(job)[-1], rel=1e-4)
    in_training = events(job)[-1].metrics or {}
    assert in_training.keys() >= score.metrics.keys()
    for name, value in score.metrics.items():
        assert in_training[name] == pytest.approx(value, rel=1e-3, abs=1e-5), name
