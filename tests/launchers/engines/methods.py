"""tiny-llama by every method and task with every engine, on one node and on two.

Whole runs, and runs that go on from a checkpoint.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from estimator.models import hf_files
from estimator.vocabulary import LAUNCHED_ENGINES
from launchers import engines, run_config
from launchers.dataset import render
from launchers.dataset.batches import collate, collate_pairs, mismatched_rows, summed_log_probabilities
from launchers.dataset.prepared import Prepared, Row
from launchers.engines.loop.preference_losses import kto_loss, sigmoid_loss
from launchers.engines.loop.tasks import Preferences, answers_of, chosen_cross_entropy, rewards_of
from launchers.engines.reward_head import as_trained
from launchers.evaluation.loading import load_model
from launchers.gang.job import TrainJob
from launchers.models import causal
from launchers.run.job import unsupported
from launchers.run_config import RunConfig
from launchers.settings import Settings
from tests.launchers.engines import ranks
from tests.launchers.engines.loop import runs
from tests.launchers.engines.loop.families import (
    CHECKPOINT,
    CLOSE,
    DOCUMENTS,
    SAME,
    STEPS,
    documents,
    loss,
    reported,
)
from tests.launchers.engines.trl import toy

METHODS: dict[str, dict[str, Any]] = {
    "full": {"method": "full"},
    "lora": {"method": "lora"},
    "rslora": {"method": "lora", "lora": {"rslora": True}},
    "dora": {"method": "dora"},
    "qlora nf4-double": {"method": "qlora"},
    "qlora nf4": {"method": "qlora", "lora": {"quantization": "nf4"}},
    "qlora int8": {"method": "qlora", "lora": {"quantization": "int8"}},
    "adapter-v1": {"method": "adapter-v1"},
    "adapter-v2": {"method": "adapter-v2"},
}
SHARDINGS = {"torchtune": ("none", "fsdp"), "deepspeed": ("zero0", "zero3"), "fsdp2": ("none", "fsdp")}
"""Of one process, and of one on each of two nodes."""
ENGINES = tuple(engine for engine in LAUNCHED_ENGINES if engine != "trl")  # it learns task grpo alone
NODES = (1, 2)
TASKS = ("pretrain", "dpo", "orpo", "simpo", "kto", "reward")  # beside sft and grpo
TASK_METHODS = ("full", "lora", "qlora nf4-double")
DATA = {"sft": "documents", "pretrain": "texts", "kto": "judged"}  # pairs for all others
LEARNING = (30, 28)  # steps of GRPO in which the reward rises, and its checkpoint
MERGED = 2e-3  # in the logits of what GRPO's toy has trained at its high rate
ROUNDED_REFERENCE = 0.02  # in the loss of DPO and KTO: qlora compares with the rounded base, the export not


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """An engine and method on a number of nodes with one process each."""

    engine: str
    method: str
    nodes: int
    task: str = "sft"

    @property
    def name(self) -> str:
        return f"{self.engine}-{self.task}-{self.method.replace(' ', '-')}-{self.nodes}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Proof:
    """The run of a cell with one step less than STEPS, and its continuation to STEPS."""

    whole: TrainJob  # of the first node
    resumed: TrainJob

    @property
    def losses(self) -> list[float]:
        return runs.losses(runs.steps(self.whole))


CELLS = tuple(
    Cell(engine=engine, method=method, nodes=nodes)
    for engine in ENGINES
    for method in METHODS
    for nodes in NODES
)
TASK_CELLS = tuple(
    Cell(engine=engine, method=method, nodes=nodes, task=task)
    for engine in ENGINES
    for task in TASKS
    for method in TASK_METHODS
    for nodes in NODES
) + tuple(
    Cell(engine="trl", method=method, nodes=nodes, task="grpo") for method in TASK_METHODS for nodes in NODES
)


def make(folder: Path) -> None:
    """Create the model and the data of all cells."""
    toy.make(folder)
    runs.make_data(folder / "documents", documents(), batch=DOCUMENTS, steps=STEPS)
    texts = [runs.joined(documents()[place : place + 2]) for place in range(0, DOCUMENTS, 2)]
    runs.make_data(folder / "texts", texts, batch=len(texts), steps=STEPS)
    pad_id = _pad_id(folder / "model")
    for name, rows in (("pairs", runs.pairs(DOCUMENTS)), ("judged", _judged())):
        runs.make_data(folder / name, rows, batch=DOCUMENTS, steps=STEPS, pad_id=pad_id)


def refusal(folder: Path, cell: Cell) -> str | None:
    """Return the reason why the engine does not train by the method, as one clause."""
    spec = hf_files.read_directory(folder / "model", "tiny-llama")
    return unsupported(cell.engine, _settings(cell, folder), spec)


def prove(folder: Path, cell: Cell) -> Proof:
    """Train, and resume from the checkpoint with the parts of all nodes; raises if a run fails."""
    drawn = cell.task == "grpo"
    steps, checkpoint = (
        LEARNING if drawn and is_expected_to_learn(cell) else (STEPS - (not drawn), CHECKPOINT)
    )
    first = _drawing_job(folder, cell, steps, checkpoint) if drawn else _job(folder, cell)
    layout = dataclasses.replace(first.plan.layout, nodes=cell.nodes, processes_per_node=1)
    first = dataclasses.replace(first, plan=dataclasses.replace(first.plan, layout=layout))
    first = runs.with_reference(first, folder / "references")
    nodes = list(_on_nodes(first, folder / cell.name, cell.nodes))
    _run(nodes)
    parts = folder / cell.name / "checkpoint"
    for node in nodes:
        shutil.copytree(node.checkpoint_dir(checkpoint), parts, dirs_exist_ok=True)
    resumed_steps = runs.resumed(first, first.work_dir, checkpoint)
    resumed_steps = dataclasses.replace(
        resumed_steps, resume_dir=parts, total_steps=steps + (not drawn), keeps_result=False
    )
    after = list(_on_nodes(resumed_steps, folder / cell.name / "resumed", cell.nodes))
    _run(after)
    return Proof(whole=nodes[0], resumed=after[0])


def _job(folder: Path, cell: Cell) -> TrainJob:
    """Return the job of the first node, with a checkpoint after CHECKPOINT steps."""
    settings = _settings(cell, folder)
    data = DATA.get(cell.task, "pairs")
    return runs.make_job(
        folder / cell.name / "node-0",
        as_trained(folder / "model", settings, folder),
        folder / data,
        steps=STEPS - 1,
        world=1,
        micro=(DOCUMENTS // 2 if data == "texts" else DOCUMENTS) // cell.nodes,
        engine=cell.engine,
        sharding=SHARDINGS[cell.engine][cell.nodes - 1],
        settings=settings.model_dump(mode="json", exclude={"checkpoint_every", "automatic_choices"}),
        checkpoint_every=CHECKPOINT,
    )


def is_expected_to_learn(cell: Cell) -> bool:
    """Return whether GRPO is expected to learn: full training does within 30 steps."""
    return cell.method == "full"


def _drawing_job(folder: Path, cell: Cell, steps: int, checkpoint: int) -> TrainJob:
    return toy.job(
        folder,
        f"{cell.name}/node-0",
        cell.method,
        world=cell.nodes,
        steps=steps,
        answers=toy.ANSWERS * cell.nodes,  # two prompts a node
        checkpoint_every=checkpoint,
    )


def problems(proof: Proof, one: Proof, folder: Path) -> list[str]:
    """List what is wrong with a proof; its result is exported into the empty folder.

    ``one``: of the same engine and method on one node, whose losses are to be the same.
    """
    if proof.whole.settings.task == "grpo":
        return _problems_of_drawing(proof, folder)
    whole_steps, after = runs.steps(proof.whole), runs.steps(proof.resumed)
    messages = []
    base = causal.load(proof.whole.model_dir, dtype=torch.float32).eval()
    rounded = proof.whole.plan.method == "qlora"
    if not rounded:
        start = _loss(proof.whole, base, base)
        if abs(proof.losses[0] - start) > CLOSE:
            messages.append("it does not begin with the model's own loss")
    if not proof.losses[-1] < proof.losses[0] - CLOSE:
        messages.append("its loss does not fall")
    if max(abs(two - single) for two, single in zip(proof.losses, one.losses, strict=True)) > CLOSE:
        messages.append("its losses are not those of one node")
    if reported(whole_steps[CHECKPOINT]) != reported(after[0]):
        messages.append("it does not resume from its checkpoint bit by bit")
    engines.get(proof.whole.plan.engine).collect(proof.whole, folder)
    result = engines.result_of(folder)
    trained = load_model(result, proof.whole.model_dir, "cpu", "fp32")
    close = ROUNDED_REFERENCE if rounded and proof.whole.settings.task in ("dpo", "kto") else CLOSE
    if abs(_loss(proof.whole, trained, base) - runs.losses(after)[-1]) > close:
        messages.append("its export has another loss than what it has trained")
    return messages + _problems_of_merging(proof, folder, trained)


def _problems_of_merging(proof: Proof, folder: Path, trained: Any, close: float = SAME) -> list[str]:
    if not (folder / "model").is_dir() or proof.whole.plan.method not in ("lora", "dora"):
        return []
    adapted = load_model(folder / "adapter", proof.whole.model_dir, "cpu", "fp32")
    tokens = torch.arange(3, 33)[None]
    with torch.no_grad():
        difference = (trained(tokens).logits - adapted(tokens).logits).abs().max()
    return [f"merged it is {difference:.0e} off its adapter"] if difference > close else []


def _problems_of_drawing(proof: Proof, folder: Path) -> list[str]:
    """List problems of GRPO; processes generate different answers, so two nodes differ from one."""
    whole_steps, after = runs.steps(proof.whole), runs.steps(proof.resumed)
    messages = []
    repeated = [(reported(step), step.metrics) for step in after]
    if not repeated or repeated != [(reported(step), step.metrics) for step in whole_steps[-len(repeated) :]]:
        messages.append("it does not resume from its checkpoint bit by bit")
    engines.get("trl").collect(proof.whole, folder)
    trained = load_model(engines.result_of(folder), proof.whole.model_dir, "cpu", "fp32")
    if len(whole_steps) == LEARNING[0]:
        rewards = [step.metrics["reward"] for step in whole_steps if step.metrics is not None]
        if not sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + toy.LEARNT:
            messages.append("its reward does not rise")
        base = load_model(proof.whole.model_dir, proof.whole.model_dir, "cpu", "fp32")
        if not toy.mean_reward(trained, proof.whole) > toy.mean_reward(base, proof.whole) + toy.LEARNT:
            messages.append("the answers of its export have no higher reward than those of the base")
    return messages + _problems_of_merging(proof, folder, trained, MERGED)


def _loss(job: TrainJob, model: Any, base: Any) -> float:
    """Return the task loss of a transformers model on all data of the job."""
    if job.settings.task in ("sft", "pretrain"):
        return loss(model)
    if job.settings.task == "kto":
        return _kto_loss(job, model, base)
    rows = runs.pairs(DOCUMENTS)
    batch = collate_pairs(rows, _pad_id(job.model_dir))
    with torch.no_grad():
        logits, before = (each(**batch.inputs).logits for each in (model, base))
    if job.settings.task == "reward":
        return sigmoid_loss(rewards_of(logits)).mean().item()
    losses, _ = Preferences(job.settings).losses(answers_of(logits, batch), answers_of(before, batch))
    if job.settings.task != "orpo":
        return losses.mean().item()
    tokens = sum(int(row.lengths[0]) - 1 for row in rows)
    return losses.mean().item() + chosen_cross_entropy(logits, batch).item() / tokens


def _kto_loss(job: TrainJob, model: Any, base: Any) -> float:
    def ahead(some: list[Row]) -> torch.Tensor:
        batch = collate(some, _pad_id(job.model_dir))
        with torch.no_grad():
            ours, before = (
                summed_log_probabilities(each(**batch.inputs).logits, batch) for each in (model, base)
            )
        return ours - before

    rows = _judged()
    kl = ahead(mismatched_rows(Prepared(job.data_dir), 0)).mean().clamp(min=0)
    good = torch.tensor([row.desirable for row in rows])
    return kto_loss(ahead(rows), good, kl, job.settings.preference.beta_of("kto")).mean().item()


def _judged() -> list[Row]:
    return runs.judged(DOCUMENTS)[:DOCUMENTS]


def _pad_id(model_dir: Path) -> int:
    return render.pad_id_of(render.load_tokenizer(model_dir, Settings()))


def _settings(cell: Cell, folder: Path) -> RunConfig:
    """Return settings with the learning rate of tiny-llama for the method and a constant schedule."""
    values: dict[str, Any] = METHODS[cell.method] | {"engine": cell.engine, "seq_len": 128, "task": cell.task}
    of_task: dict[str, dict[str, Any]] = {
        "pretrain": {"packing": True},
        "grpo": {"rl": {"reward": "a.py:f"}},
    }
    values |= of_task.get(cell.task, {})
    chosen = Settings.model_validate(values | {"schedule": {"name": "constant", "warmup_steps": 0}})
    spec = hf_files.read_directory(folder / "model", "tiny-llama")
    return run_config.resolve(chosen, spec, method=chosen.method, engine=cell.engine)


def _on_nodes(job: TrainJob, folder: Path, nodes: int) -> Iterator[TrainJob]:
    for node in range(nodes):
        yield dataclasses.replace(job, work_dir=folder / f"node-{node}")


def _run(nodes: Sequence[TrainJob]) -> None:
    done = ranks.train(nodes)
    if done.returncode:
        raise RuntimeError(done.stderr[-6000:])
