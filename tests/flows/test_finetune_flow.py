"""The main job from end to end: every engine and method, one node and two."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from launchers.report.metrics import Metrics
from tests.conftest import write_pairs
from tests.flows.conftest import EVALUATED, QUICK, STEPS, FlowRun
from tests.launchers.harness.files import HAS_HARNESS, NO_HARNESS


@pytest.mark.parametrize(
    ("engine", "method", "nodes"),
    [
        ("torchtune", "lora", 1),
        # Elsewhere: torchtune on two nodes (tests/slurm/test_slurm.py), DeepSpeed on two nodes
        # (test_finetune_flow_faults.py and tests/batch, nightly), FSDP2 on one node (below) and on two
        # (test_suspicions.py).
        pytest.param("torchtune", "full", 2, marks=[pytest.mark.slow, pytest.mark.nightly]),
        pytest.param("torchtune", "qlora", 1, marks=[pytest.mark.slow, pytest.mark.nightly]),
    ],
)
def test_a_run_learns_and_exports_a_model_that_transformers_loads(
    finished_run: Callable[[str, str, int], FlowRun], engine: str, method: str, nodes: int
) -> None:
    run = finished_run(engine, method, nodes)
    artifacts = run.artifacts()
    losses = [row["loss"] for row in artifacts["metrics"]]
    assert len(losses) == STEPS
    assert losses[-1] < losses[0] - 0.05
    assert set(artifacts["metrics"][0]) == {field.name for field in fields(Metrics)}
    run_id, step, task = artifacts["training_task"].split("/")
    assert (run_id, step) == (run.run_id, "train_nodes" if nodes > 1 else "train")
    assert "_node_" not in task  # Metaflow's name for tasks of nodes other than the first
    assert f"card view {artifacts['training_task']} --id finetune" in run.text
    assert artifacts["plan"].layout.nodes == nodes
    assert artifacts["measured"].memory_peak_bytes > 100 * 2**20
    assert artifacts["evaluation"].finetuned.loss < artifacts["evaluation"].base.loss
    evaluations = artifacts["outcome"].evaluations
    assert [each.step for each in evaluations] == [EVALUATED, 2 * EVALUATED, STEPS]
    # the same measure on the same rows: of the model that was trained, and of the one that is handed over
    assert evaluations[-1].loss == pytest.approx(artifacts["evaluation"].finetuned.loss, rel=2e-3)
    assert any(name == "exported" for name, _ in artifacts["facts"])
    model = Path(artifacts["model_path"])
    adapter = method != "full"
    assert (model.parent / "adapter" / "adapter_model.safetensors").exists() == adapter
    assert not list(model.glob("adapter*"))
    assert_generates(model)


def assert_generates(folder: Path) -> None:
    """Check that transformers (with PEFT for an adapter) generates from the folder."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder)
    prompt: Any = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        [{"role": "user", "content": "Add the two numbers.\n1 and 2"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    tokens = model.generate(**prompt, max_new_tokens=8, do_sample=False)
    assert tokens.shape[1] > prompt["input_ids"].shape[1]


@pytest.mark.slow
@pytest.mark.skipif(not HAS_HARNESS, reason=NO_HARNESS)
@pytest.mark.nightly
def test_an_adapter_only_export_is_scored_by_harness_tasks_and_answers(
    finished_run: Callable[[str, str, int], FlowRun],
) -> None:
    run = finished_run("fsdp2", "lora", 1)
    artifacts = run.artifacts()
    adapter = Path(artifacts["model_path"])
    assert [path.name for path in adapter.parent.iterdir() if path.is_dir()] == ["adapter"]
    assert artifacts["evaluation"].finetuned.loss < artifacts["evaluation"].base.loss
    (row,) = artifacts["task_metrics"].rows
    assert (row.task, row.metric, row.rows) == ("sums", "acc", 6)
    fact = ("sums, acc", artifacts["task_metrics"].facts()[0][1])
    assert fact in artifacts["facts"]
    assert f"| {fact[0]} | {fact[1]} |" in (adapter / "README.md").read_text()
    assert f"{fact[0]}: {fact[1]}" in run.output
    assert "GGUF: python llama.cpp/convert_lora_to_gguf.py" in run.output
    assert_generates(adapter)


@pytest.mark.slow
@pytest.mark.nightly
def test_an_adapter_that_cannot_be_merged_is_evaluated_and_exported_with_a_model_card(
    finished_run: Callable[[str, str, int], FlowRun],
) -> None:
    artifacts = finished_run("fsdp2", "adapter-v2", 1).artifacts()
    adapter = Path(artifacts["model_path"])
    assert adapter.name == "adapter"
    assert not (adapter.parent / "model").exists()
    assert artifacts["evaluation"].finetuned.loss < artifacts["evaluation"].base.loss - 0.01
    assert len(artifacts["evaluation"].answers) == 1
    assert (adapter / "tokenizer.json").exists()
    assert "adapter_v2.load" in (adapter / "README.md").read_text()


SCORE = """
import sys, torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

model = AutoModelForSequenceClassification.from_pretrained(sys.argv[1]).eval()
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
for answer in ("The sum is 3.", "THE SUM IS 3."):
    chat = [{"role": "user", "content": "Add the two numbers.\\n\\n1 and 2"}]
    text = tokenizer.apply_chat_template([*chat, {"role": "assistant", "content": answer}], tokenize=False)
    encoded = tokenizer(text, add_special_tokens=False, return_tensors="pt")
    with torch.no_grad():
        print(model(**encoded).logits.item())
"""


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize(("task", "method"), [("dpo", "full"), ("reward", "lora")])
def test_training_on_pairs_improves_the_ranking_of_held_out_pairs(
    flow: Callable[..., FlowRun], tmp_path: Path, task: str, method: str
) -> None:
    pairs = write_pairs(tmp_path / "pairs.jsonl")
    chosen = [f"--task={task}", f"--method={method}", "--nodes=1", f"--dataset={pairs}"]
    no_answers = ["--set=evaluation.generations=0"] if task == "reward" else []
    run = flow("run", *chosen, *QUICK, *no_answers)
    assert run.returncode == 0, run.output
    assert ("reference: 1 of 1 parts" in run.output) == (task == "dpo")
    artifacts = run.artifacts()
    last = artifacts["metrics"][-1]
    assert last["loss"] < artifacts["metrics"][0]["loss"]
    assert {"reward_chosen", "reward_rejected", "reward_margin", "accuracy"} == set(last["task"])
    before, after = artifacts["evaluation"].base, artifacts["evaluation"].finetuned
    assert after.loss < before.loss
    assert after.metrics["accuracy"] > max(0.9, before.metrics["accuracy"] - 0.1)
    if task == "reward":
        scored = subprocess.run(
            [sys.executable, "-c", SCORE, artifacts["model_path"]],
            env=run.environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=True,
        )
        better, worse = map(float, scored.stdout.split())
        assert better > worse + 0.1


@pytest.mark.slow
@pytest.mark.nightly
def test_plain_text_is_learned_within_a_token_budget_and_evaluated_by_perplexity(
    flow: Callable[..., FlowRun], tmp_path: Path
) -> None:
    sentences = [f"The sum of {a} and {b} is {a + b}." for a in range(30) for b in range(30)]
    (tmp_path / "book.txt").write_text("\n".join(sentences))
    (tmp_path / "more.jsonl").write_text(json.dumps({"text": " ".join(sentences[:90])}) + "\n")
    chosen = ["--task=pretrain", "--dataset=book.txt", "--set", "mixture={more.jsonl: 2}", "--packing=true"]
    run = flow("run", *chosen, "--tokens=20k", "--set=evaluation.generations=1")
    assert run.returncode == 0, run.output
    artifacts = run.artifacts()
    assert len(artifacts["metrics"]) == 5, "of 16 sequences of 256 tokens each"
    assert "20,000: 5 steps" in run.output
    assert "more.jsonl: weight 2, 2 rows an epoch" in run.output
    assert "perplexity" in run.output
    assert artifacts["evaluation"].finetuned.loss < artifacts["evaluation"].base.loss - 0.5
