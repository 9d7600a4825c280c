"""The DeepSpeed engine in gangs of two processes on CPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from launchers.dataset.prepared import IGNORE
from launchers.engines.deepspeed.engine import DeepSpeed
from launchers.gang.job import TrainJob
from launchers.report import telemetry
from tests.launchers.engines.loop import runs

pytestmark = pytest.mark.slow
STEPS = 6
DOCUMENTS = 8  # each is seen three times
CLOSE = 2e-6  # relative; the order of a sum of fp32 differs between layouts


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, model: Path, data: Path) -> TrainJob:
    """The run that others are compared with: two processes, ZeRO 2, all weights, done."""
    job = runs.make_job(tmp_path_factory.mktemp("plain"), model, data, steps=STEPS, checkpoint_every=3)
    runs.run(job)
    return job


def first_loss(model: Path, documents: int = 4) -> float:
    """Mean loss of the first step's documents, each alone, by transformers."""
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    total, count = 0.0, 0
    for row in runs.documents(DOCUMENTS)[:documents]:
        labels = torch.tensor(row.labels[1:]).long()
        with torch.no_grad():
            logits = network(torch.tensor(row.tokens).long()[None]).logits[0, :-1]
        total += float(torch.nn.functional.cross_entropy(logits, labels, reduction="sum"))
        count += int((labels != IGNORE).sum())
    return total / count


def collected(job: TrainJob, folder: Path) -> Path:
    DeepSpeed().collect(job, folder)
    return folder


def answer(folder: Path) -> list[int]:
    """Loads an exported model and has it go on from three tokens."""
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens: list[int] = network.generate(torch.tensor([[5, 8, 11]]), max_new_tokens=5, do_sample=False)[
        0
    ].tolist()
    return tokens


@pytest.mark.parametrize(
    "sharding", ["zero0", pytest.param("zero1", marks=pytest.mark.nightly), "zero2", "zero3"]
)
def test_every_stage_starts_from_the_models_loss_and_learns(
    tmp_path: Path, plain: TrainJob, sharding: str
) -> None:
    job = plain
    if sharding != "zero2":
        job = runs.make_job(
            tmp_path / "work", plain.model_dir, plain.data_dir, steps=STEPS, sharding=sharding
        )
        runs.run(job)
    steps = runs.steps(job)
    losses = runs.losses(steps)
    assert losses[0] == pytest.approx(first_loss(job.model_dir), rel=CLOSE)
    assert losses[-1] < losses[0] - 0.2
    assert all(step.grad_norm and step.grad_norm > 0 for step in steps)
    assert [step.lr for step in steps][:3] == pytest.approx([0.0, 0.005, 0.01])
    assert all(
        step.samples == 2 and step.dtf and step.dtb and step.dtf + step.dtb < step.dt for step in steps
    )
    other = runs.steps(job, rank=1)
    assert len(other) == STEPS
    assert all(step.loss is None for step in other)
    assert len(answer(collected(job, tmp_path / "out") / "model")) == 8


def test_phases_are_told_in_order(tmp_path: Path, model: Path, data: Path) -> None:
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
def test_precision_offload_and_checkpointing(
    tmp_path: Path, model: Path, data: Path, options: dict[str, Any], method: str
) -> None:
    job = runs.make_job(tmp_path, model, data, steps=STEPS, settings={"method": method}, **options)
    losses = runs.losses(runs.run(job))
    assert losses[0] == pytest.approx(first_loss(model), rel=1e-3)
    assert losses[-1] < losses[0] - 0.05


@pytest.mark.parametrize(
    "layout",
    [
        {"world": 2, "micro": 1, "accumulation": 2},
        pytest.param({"world": 1, "micro": 4}, marks=pytest.mark.nightly),
    ],
)
def test_accumulation_and_world_size_do_not_change_the_loss(
    tmp_path: Path, plain: TrainJob, layout: dict[str, Any]
) -> None:
    job = runs.make_job(tmp_path, plain.model_dir, plain.data_dir, steps=STEPS, **layout)
    assert runs.losses(runs.run(job)) == pytest.approx(runs.losses(runs.steps(plain)), rel=1e-5)


def test_packed_documents_do_not_see_each_other(tmp_path: Path, plain: TrainJob) -> None:
    """The same documents two by two in rows give the loss that they give alone."""
    documents = runs.documents(DOCUMENTS)
    rows = [runs.joined(documents[i : i + 2]) for i in range(0, DOCUMENTS, 2)]
    packed = runs.make_data(tmp_path / "packed", rows, batch=2, steps=STEPS)
    together = runs.run(runs.make_job(tmp_path / "work", plain.model_dir, packed, steps=STEPS, micro=1))
    assert runs.losses(together) == pytest.approx(runs.losses(runs.steps(plain)), rel=1e-5)


@pytest.mark.parametrize(
    ("sharding", "method", "lora"),
    [
        pytest.param("zero2", "lora", {}, marks=pytest.mark.nightly),
        ("zero3", "lora", {}),
        ("zero2", "lora", {"rslora": True, "targets": "all-linear"}),
        pytest.param("zero2", "dora", {}, marks=pytest.mark.nightly),
        ("zero3", "dora", {}),
    ],
    ids=["lora-zero2", "lora-zero3", "rslora-zero2", "dora-zero2", "dora-zero3"],
)
def test_adapters_are_left_with_the_model_that_they_make(
    tmp_path: Path, model: Path, data: Path, sharding: str, method: str, lora: dict[str, Any]
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    job = runs.make_job(
        tmp_path / "work",
        model,
        data,
        steps=STEPS,
        sharding=sharding,
        settings={"method": method, "lora": lora, "optimizer": {"lr": 1e-2 if "rslora" in lora else 5e-2}},
    )
    losses = runs.losses(runs.run(job))
    assert losses[0] == pytest.approx(first_loss(model), rel=CLOSE)
    assert losses[-1] < losses[0] - 0.03
    written = runs.read_json(job.output_dir / "adapter" / "adapter_config.json")
    assert (written["use_dora"], written["use_rslora"]) == (method == "dora", lora.get("rslora", False))
    out = collected(job, tmp_path / "out")
    assert not list((out / "model").glob("adapter*"))
    merged = AutoModelForCausalLM.from_pretrained(out / "model", dtype=torch.float32).eval()
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    tokens = torch.arange(3, 33)[None]
    with torch.no_grad():
        before = base(tokens).logits
        adapted = PeftModel.from_pretrained(base, str(out / "adapter")).eval()(tokens).logits
        assert torch.allclose(merged(tokens).logits, adapted, atol=1e-5)
    assert not torch.allclose(before, adapted, atol=1e-2)


def test_mixture_of_experts_with_zero3(tmp_path: Path, data: Path) -> None:
    model = runs.make_model(tmp_path / "mixtral", "mixtral")
    job = runs.make_job(tmp_path / "work", model, data, steps=STEPS, sharding="zero3")
    losses = runs.losses(runs.run(job))
    assert losses[0] == pytest.approx(first_loss(model), rel=CLOSE)
    assert losses[-1] < losses[0] - 0.2
    assert len(answer(collected(job, tmp_path / "out") / "model")) == 8


def goes_on_from_its_checkpoint(job: TrainJob, folder: Path) -> None:
    """With two processes bit by bit as if nothing had happened, with one but for the order of sums."""
    whole = runs.steps(job)
    assert [path.name for path in job.checkpoints_dir.iterdir()] == ["step-00000003"]  # none after the last
    assert len(list(job.checkpoint_dir(3).glob("rank-*.json"))) == 2
    again = runs.resumed(job, folder / "two", 3)
    rest = runs.run(again)
    assert [step.step for step in rest] == [4, 5, 6]
    assert [(s.loss, s.grad_norm, s.lr) for s in rest] == [(s.loss, s.grad_norm, s.lr) for s in whole[3:]]
    one, other = ((j.output_dir / "model" / "model.safetensors").read_bytes() for j in (job, again))
    assert one == other
    alone = runs.resumed(job, folder / "one", 3, processes_per_node=1, accumulation=2)
    assert runs.losses(runs.run(alone)) == pytest.approx(runs.losses(whole[3:]), rel=1e-5)
    assert not (alone.work_dir / "engine" / "resume").exists()


def test_a_full_run_goes_on_from_its_checkpoint(tmp_path: Path, plain: TrainJob) -> None:
    goes_on_from_its_checkpoint(plain, tmp_path)


def test_dropout_goes_on_where_it_was(tmp_path: Path, plain: TrainJob) -> None:
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
    whole = runs.run(job)
    rest = runs.run(runs.resumed(job, tmp_path / "resumed", 2))
    assert runs.losses(rest) == runs.losses(whole)[2:]


def test_targets_that_the_model_has_not_are_named(tmp_path: Path, data: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    shape = {"vocab_size": runs.VOCAB, "n_positions": 128, "n_embd": 32, "n_layer": 1, "n_head": 2}
    GPT2LMHeadModel(GPT2Config(**shape)).save_pretrained(tmp_path / "gpt2")
    job = runs.make_job(
        tmp_path / "work", tmp_path / "gpt2", data, steps=1, world=1, micro=4, settings={"method": "lora"}
    )
    done = runs.start(job)
    assert done.returncode != 0
    assert "has no such linear layers" in done.stderr
