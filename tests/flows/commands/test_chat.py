"""``finetune chat``: the model of a finished run answers on the command line."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from estimator.errors import UserError
from estimator.plan import GIB
from flows.commands import chat as finetune_chat
from launchers.inference import memory
from tests.flows.conftest import FlowRun

QUESTION = "What is 12 plus 30?"


@pytest.fixture(scope="module")
def run(finished_run: Callable[[str, str, int], FlowRun]) -> FlowRun:
    return finished_run("torchtune", "lora", 1)


@pytest.fixture
def chat(run: FlowRun, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """``chat("--once", input="Hello", folder=...)``: run the command as in a shell."""
    script = tmp_path / "finetune"
    script.write_text("from estimator.cli.app import main\nmain()\n")

    def call(
        *arguments: str, message: str = QUESTION, folder: Path = run.home, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, str(script), "chat", *arguments],
            cwd=folder,
            env={**run.environment, "PYTHONPATH": str(Path(__file__).parents[3]), **environment},
            input=message,
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )

    return call


def generated(folder: Path) -> str:
    """Return the greedy answer from the example on the model card."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    inputs: Any = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    answer = model.generate(**inputs, max_new_tokens=24, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    return str(tokenizer.decode(answer, skip_special_tokens=True))


@pytest.mark.slow
def test_the_newest_run_answers_a_piped_message_like_generate(
    run: FlowRun, chat: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    arguments = ("--once", "--max-new-tokens=24", "--temperature=0")
    done = chat(*arguments)
    assert done.returncode == 0, done.stderr
    (folder,) = (run.home / "finetuned").glob("*/model")
    assert done.stdout == generated(folder) + "\n"
    with_base = chat(*arguments, "--with-base", run.run_id)
    assert with_base.returncode == 0, with_base.stderr
    assert with_base.stdout.startswith(f"tiny-llama-finetuned> {done.stdout}")
    assert "\nbase> " in with_base.stdout


def test_a_missing_model_gives_a_two_line_error(
    chat: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    (tmp_path / ".metaflow").mkdir()
    nowhere = {"METAFLOW_DATASTORE_SYSROOT_LOCAL": str(tmp_path)}
    done = chat("--once", folder=tmp_path, **nowhere)
    assert done.returncode == 2
    assert "no run with a model" in done.stderr
    assert len(done.stderr.splitlines()) == 2, done.stderr
    with pytest.raises(UserError, match="no model in"):
        finetune_chat.chat(str(tmp_path))


def test_a_model_that_does_not_fit_is_refused_before_it_is_loaded(
    run: FlowRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder,) = (run.home / "finetuned").glob("*/model")
    free = memory.Memory(device="cpu", free_bytes=(GIB // 8,))
    monkeypatch.setattr(memory, "free_memory", lambda _: free)
    with pytest.raises(UserError, match=r"needs .* to answer .* tokens\); 0.12 GiB are free"):
        finetune_chat.chat(str(folder), max_new_tokens=16, device="cpu")


@pytest.mark.slow
def test_a_run_without_its_output_folder_answers_from_the_datastore(
    run: FlowRun, chat: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    (home,) = (run.home / "finetuned").glob("*")
    hidden = run.home / "elsewhere"
    home.rename(hidden)
    try:
        done = chat("--once", "--max-new-tokens=4", XDG_CACHE_HOME=str(tmp_path / "cache"))
    finally:
        hidden.rename(home)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "cache" / "metaflow-finetune" / "runs" / f"FinetuneFlow-{run.run_id}").is_dir()


@pytest.mark.slow
def test_load_model_accepts_a_run_and_restores_the_namespace(run: FlowRun) -> None:
    code = """
from metaflow import Run, get_namespace, load_model, namespace
namespace(None)
run = Run("FinetuneFlow/{run}")
namespace("user:jane")
model, tokenizer = load_model(run)
print(type(model).__name__, bool(tokenizer.chat_template), get_namespace())
"""
    done = subprocess.run(
        [sys.executable, "-c", code.replace("{run}", run.run_id)],
        cwd=run.home,
        env=run.environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.stdout == "LlamaForCausalLM True user:jane\n", done.stderr
