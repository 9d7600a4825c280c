"""LLaMA-Adapters trained by both shardings, resumed, and put onto their base again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from launchers import engines
from launchers.dataset.prepared import IGNORE, Row
from launchers.gang.job import TrainJob
from tests.launchers.engines.loop import runs

pytestmark = pytest.mark.slow
STEPS = 6
CLOSE = 2e-6  # relative; the order of a sum of fp32 differs between layouts
METHODS = ("adapter-v1", "adapter-v2")
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {"engine": "fsdp2", "sharding": "none", "world": 1, "micro": 4},
    "fsdp": {"engine": "fsdp2", "sharding": "fsdp"},
    "grad-op": {"engine": "fsdp2", "sharding": "shard_grad_op", "micro": 1, "accumulation": 2},
    "checkpointing": {"engine": "fsdp2", "sharding": "fsdp", "activation_checkpointing": True},
    "offload": {"engine": "fsdp2", "sharding": "fsdp", "offload": "cpu"},
    "zero0": {"sharding": "zero0"},
    "zero1": {"sharding": "zero1"},
    "zero2": {"sharding": "zero2"},
    "zero3": {"sharding": "zero3"},
    "zero3-checkpointing": {"sharding": "zero3", "activation_checkpointing": True},
    "zero-one": {"sharding": "zero0", "world": 1, "micro": 4},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose attention weighs something, as prompts work through it alone."""
    folder = runs.make_model(tmp_path_factory.mktemp("model"))
    network = plain(folder)
    with torch.no_grad():
        for block in network.model.layers:
            block.self_attn.v_proj.weight.mul_(20)
            block.self_attn.o_proj.weight.mul_(20)
    network.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=METHODS)
def whole(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, model: Path, data: Path
) -> TrainJob:
    """A run on two processes that others are compared with, done; with a checkpoint after half its steps."""
    job = made(tmp_path_factory.mktemp("whole"), model, data, request.param, "fsdp", checkpoint_every=3)
    runs.run(job)
    return job


def made(
    work: Path,
    model: Path,
    data: Path,
    method: str,
    layout: str,
    *,
    steps: int = STEPS,
    schedule: dict[str, Any] | None = None,
    **options: Any,
) -> TrainJob:
    """A job with prompts in the second of two blocks, at a rate at which the gates open in six steps."""
    settings: dict[str, Any] = {"method": method, "adapter": {"start_layer": 1}, "optimizer": {"lr": 0.5}}
    if schedule is not None:
        settings["schedule"] = schedule
    return runs.make_job(work, model, data, steps=steps, settings=settings, **LAYOUTS[layout], **options)


def losses(job: TrainJob) -> list[float]:
    return runs.losses(runs.steps(job))


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(layout, marks=[] if layout == "zero3" else pytest.mark.nightly)
        for layout in LAYOUTS
        if layout != "fsdp"
    ],
)
def test_no_engine_and_no_layout_changes_the_losses(tmp_path: Path, whole: TrainJob, layout: str) -> None:
    job = made(tmp_path, whole.model_dir, whole.data_dir, whole.plan.method, layout)
    runs.run(job)
    assert losses(job) == pytest.approx(losses(whole), rel=CLOSE)
    first, fifth = losses(job)[0], losses(job)[4]  # of the same rows
    assert fifth < first - (0.5 if whole.plan.method == "adapter-v2" else 0.005)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "layout",
    [
        "fsdp",
        "zero2",
        "zero3",
    ],
)
@pytest.mark.parametrize("method", METHODS)
def test_mixed_precision_trains_as_fp32_but_for_bf16s_digits(
    tmp_path: Path, model: Path, data: Path, method: str, layout: str
) -> None:
    precision = "bf16-mixed" if layout == "fsdp" else "bf16"
    plain, mixed = (
        made(tmp_path / name, model, data, method, layout, precision=name) for name in ("fp32", precision)
    )
    runs.run(plain)
    runs.run(mixed)
    assert losses(mixed) == pytest.approx(losses(plain), rel=1e-2)
    assert losses(mixed) != losses(plain)


@pytest.mark.parametrize(
    "layout",
    [
        "fsdp",
        pytest.param("zero2", marks=pytest.mark.nightly),
        pytest.param("zero3", marks=pytest.mark.nightly),
    ],
)
@pytest.mark.parametrize("method", METHODS)
def test_a_run_goes_on_from_its_checkpoint_bit_by_bit(
    tmp_path: Path, model: Path, data: Path, method: str, layout: str
) -> None:
    job = made(tmp_path / "whole", model, data, method, layout, checkpoint_every=3)
    runs.run(job)
    again = runs.resumed(job, tmp_path / "again", 3)
    assert runs.losses(runs.run(again)) == losses(job)[3:]
    weights = "adapter_model" if method == "adapter-v1" else "adapter_v2"
    one, other = (each.output_dir / "adapter" / f"{weights}.safetensors" for each in (job, again))
    assert one.read_bytes() == other.read_bytes()


@pytest.mark.nightly
@pytest.mark.parametrize("world", [1, 4])
def test_fsdp2_goes_on_from_a_checkpoint_on_another_number_of_processes(
    tmp_path: Path, whole: TrainJob, world: int
) -> None:
    layout = {"processes_per_node": world, "micro_batch_size": 4 // world}
    if world == 1:
        layout["sharding"] = "none"  # type: ignore[assignment]
    again = runs.resumed(whole, tmp_path, 3, **layout)
    assert runs.losses(runs.run(again)) == pytest.approx(losses(whole)[3:], rel=CLOSE)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param("one", marks=pytest.mark.nightly),
        "fsdp",
        pytest.param("zero2", marks=pytest.mark.nightly),
        pytest.param("zero3", marks=pytest.mark.nightly),
    ],
)
@pytest.mark.parametrize("method", METHODS)
def test_what_is_handed_over_answers_as_the_model_that_was_trained(
    tmp_path: Path, model: Path, data: Path, method: str, layout: str
) -> None:
    """A run of one step more says what the loss of the handed over model is, on that step's rows."""
    constant = {"name": "constant", "warmup_steps": 0}
    job, longer = (
        made(tmp_path / f"{steps}", model, data, method, layout, steps=steps, schedule=constant)
        for steps in (STEPS - 1, STEPS)
    )
    runs.run(job)
    expected = runs.losses(runs.run(longer))[-1]
    engines.get(job.plan.engine).collect(job, tmp_path / "out")
    result = engines.result_of(tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == [result.name] == ["adapter"]
    rows = [runs.documents(8)[index % 8] for index in range(4 * (STEPS - 1), 4 * STEPS)]
    assert loss_of(put_onto(model, result, method), rows) == pytest.approx(expected, rel=1e-5)
    assert loss_of(plain(model), rows) > expected + 1e-3, "something was trained"


def plain(model: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)


def put_onto(model: Path, adapter: Path, method: str) -> Any:
    if method == "adapter-v1":
        from peft import PeftModel

        return PeftModel.from_pretrained(plain(model), str(adapter))
    from launchers.engines.loop import adapter_v2

    return adapter_v2.load(model, adapter, dtype=torch.float32)


def loss_of(network: Any, rows: list[Row]) -> float:
    """Mean loss of documents, each alone."""
    network.eval()
    total, count = 0.0, 0
    for row in rows:
        labels = torch.tensor(row.labels[1:]).long()
        with torch.no_grad():
            logits = network(input_ids=torch.tensor(row.tokens).long()[None]).logits[0, :-1]
        total += float(torch.nn.functional.cross_entropy(logits, labels, reduction="sum"))
        count += int((labels != IGNORE).sum())
    return total / count
