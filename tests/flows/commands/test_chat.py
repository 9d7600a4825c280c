"""``finetune chat``: the model of a finished run answers on the command line."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from estimator.errors import UserError
from estimator.plan import GIB
from flows.commands import chat as finetune_chat
from launchers.inference import memory
from tests.flows.conftest import FlowRun, environment
from tests.warm_python import WarmPython

Chat = Callable[..., subprocess.CompletedProcess[str]]

ROOT = Path(__file__).parents[3]
QUESTION = "What is 12 plus 30?"


@pytest.fixture(scope="module")
def run(finished_run: Callable[[str, str, int], FlowRun]) -> FlowRun:
    return finished_run("torchtune", "lora", 1)


@pytest.fixture(scope="module")
def warm(run: FlowRun) -> Iterator[WarmPython]:
    modules = ("auto.modeling_auto", "llama.modeling_llama")
    names = (f"transformers.models.{name}" for name in modules)
    with WarmPython(*names, environment=run.environment, folder=run.home) as started:
        yield started


@pytest.fixture
def chat(run: FlowRun, warm: WarmPython, tmp_path: Path) -> Chat:
    """``chat("--once")``: run the command as in a shell, with ``QUESTION`` as input."""
    script = tmp_path / "finetune"
    script.write_text("from estimator.cli.app import main\nmain()\n")

    def call(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return warm.run(
            [str(script), "chat", *arguments],
            folder=run.home,
            environment={**run.environment, **variables},
            message=QUESTION,
        )

    return call


@pytest.fixture(scope="module")
def answer(run: FlowRun) -> str:
    """The greedy answer of the example on the model card."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    (folder,) = (run.home / "finetuned").glob("*/model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    inputs: Any = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    tokens = model.generate(**inputs, max_new_tokens=24, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    return str(tokenizer.decode(tokens, skip_special_tokens=True))


GREEDY = ("--once", "--max-new-tokens=24", "--temperature=0")


@pytest.mark.slow
def test_the_newest_run_and_its_base_answer_a_piped_message_like_generate(chat: Chat, answer: str) -> None:
    done = chat(*GREEDY, "--with-base")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"tiny-llama-finetuned> {answer}\n")
    assert "\nbase> " in done.stdout


def test_a_missing_model_gives_a_two_line_error(tmp_path: Path) -> None:
    (tmp_path / ".metaflow").mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "estimator.cli.app", "chat", "--once"],
        cwd=tmp_path,
        env=environment(tmp_path, PYTHONPATH=str(ROOT)),
        input=QUESTION,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
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
    run: FlowRun, chat: Chat, answer: str, tmp_path: Path
) -> None:
    (home,) = (run.home / "finetuned").glob("*")
    hidden = run.home / "elsewhere"
    home.rename(hidden)
    try:
        done = chat(*GREEDY, run.run_id, XDG_CACHE_HOME=str(tmp_path / "cache"))
    finally:
        hidden.rename(home)
    assert done.returncode == 0, done.stderr
    assert done.stdout == answer + "\n"
    assert (tmp_path / "cache" / "metaflow-finetune" / "runs" / f"FinetuneFlow-{run.run_id}").is_dir()


@pytest.mark.slow
def test_load_model_accepts_a_run_and_restores_the_namespace(
    run: FlowRun, warm: WarmPython, tmp_path: Path
) -> None:
    code = """
from metaflow import Run, get_namespace, load_model, namespace
namespace(None)
run = Run("FinetuneFlow/{run}")
namespace("user:jane")
model, tokenizer = load_model(run)
print(type(model).__name__, bool(tokenizer.chat_template), get_namespace())
"""
    script = tmp_path / "load.py"
    script.write_text(code.replace("{run}", run.run_id))
    done = warm.run([str(script)], folder=run.home, environment=run.environment)
    assert done.stdout == "LlamaForCausalLM True user:jane\n", done.stderr
