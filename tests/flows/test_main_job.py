"""The main job from end to end: every engine and method, one node and two."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.flows.conftest import QUICK, FlowRun

GENERATE = """
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
chat = [{"role": "user", "content": "Add the two numbers.\\n1 and 2"}]
prompt = tokenizer.apply_chat_template(
    chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
)
answer = model.generate(**prompt, max_new_tokens=8, do_sample=False)
print("generated", answer.shape[1] - prompt["input_ids"].shape[1])
"""

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize(
    ("engine", "method"),
    [("torchtune", "full"), ("torchtune", "lora"), ("deepspeed", "full"), ("deepspeed", "lora")],
)
def test_a_run_learns_and_hands_over_a_model_that_transformers_loads(
    flow: Callable[..., FlowRun], dataset: Path, engine: str, method: str, nodes: int
) -> None:
    chosen = ["--engine", engine, "--method", method, "--nodes", str(nodes)]
    run = flow("run", *chosen, "--dataset", str(dataset), *QUICK)
    check_finished(run, nodes=nodes, adapter=method == "lora")


def test_qlora_runs_on_torchtune(flow: Callable[..., FlowRun], dataset: Path) -> None:
    run = flow("run", "--method", "qlora", "--dataset", str(dataset), *QUICK)
    check_finished(run, nodes=1, adapter=True)


def check_finished(run: FlowRun, *, nodes: int, adapter: bool) -> None:
    assert run.returncode == 0, run.output
    found = run.artifacts()
    losses = [row["loss"] for row in found["metrics"]]
    assert len(losses) == 8
    assert losses[-1] < losses[0] - 0.05
    assert found["plan"].layout.nodes == nodes
    assert found["measured"].memory_peak_bytes > 100 * 2**20
    assert found["evaluation"].finetuned.loss < found["evaluation"].base.loss
    model = Path(found["model_path"])
    assert (model.parent / "adapter" / "adapter_model.safetensors").exists() == adapter
    assert not list(model.glob("adapter*"))
    generated = subprocess.run(
        [sys.executable, "-c", GENERATE, str(model)],
        env=run.environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert generated.stdout.startswith("generated ")
    assert int(generated.stdout.split()[1]) > 0
