"""User errors: one clear line and advice before a GPU is requested, never a traceback."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from launchers.models import tiny_llama
from tests.flows.conftest import FLOW, FlowRun, environment
from tests.warm_python import WarmPython

GOOD_ROW = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}
ON_AN_A100 = ("--with", "kubernetes", "--from-catalogue", "--gpu", "A100-80GB", "--nodes", "1")


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WarmPython]:
    """A Python process that has imported Metaflow and the planning modules, but no training package."""
    home = tmp_path_factory.mktemp("warm")
    with WarmPython("flows.finetune.steps", environment=environment(home), folder=home) as started:
        yield started


@pytest.fixture
def launch(warm: WarmPython, tmp_path: Path) -> Callable[..., FlowRun]:
    """``launch("run", "--nodes", "0")``: run the command line of the flow, which ends before any task."""

    def run(*arguments: str) -> FlowRun:
        variables = environment(tmp_path)
        done = warm.run([str(FLOW), *arguments], folder=tmp_path, environment=variables, merge=True)
        return FlowRun(tmp_path, variables, done.returncode, done.stdout, seconds=0.0)

    return run


def check_refused(run: FlowRun, *arguments: str) -> None:
    assert run.returncode == 2
    assert "Traceback" not in run.output, run.output
    assert "Workflow starting" not in run.output, "the run should not even have begun"
    text = " ".join(run.output.split())
    for word in arguments:
        assert word in text, run.output


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--model", "lama-8b"], ["lama-8b", "llama-8b"]),
        (["--nodes", "0"], ["nodes = 0"]),
        (["--seq-len", "4096"], ["4096", "2048"]),
        (["--set", "optimizer.lt=1"], ["optimizer.lt", "optimizer.lr"]),
        (["--dataset", "missing.jsonl"], ["missing.jsonl"]),
        (
            ["--model", "mixtral-8x7b", "--method", "lora", "--engine", "torchtune"],
            ["torchtune", "--engine deepspeed"],
        ),
        (
            ["--engine", "fsdp2", "--set", "fp8=tensorwise", *ON_AN_A100],
            ["tensorwise needs GPUs of compute capability 8.9", "A100"],
        ),
        (["--task", "orpo", "--packing", "true"], ["packing", "pair of answers"]),
        (["--task", "reward", "--method", "adapter-v1"], ["task reward with method adapter-v1"]),
        (["--task", "reward", "--model", "olmo-2-7b", *ON_AN_A100], ["no sequence classification"]),
        (["--task", "pretrain", "--dataset", "book.txt", "--tokens", "5x"], ["tokens = '5x'", "300M"]),
        (["--method", "full", "--set", "lora.rank=16"], ["--lora-rank does not apply to --method full"]),
        (["--method", "full", "--lora-rank", "8"], ["--lora-rank does not apply to --method full"]),
        (["--output-dir", "x" * 300], ["File name too long", "Use another path"]),
        (["--dataset", "x" * 300], ["File name too long", "Use another path"]),
        (["--model", "./" + "x" * 300], ["File name too long", "Use another path"]),
        (["--spot"], ["--spot has no effect on this machine", "--with kubernetes"]),
        (["--queue=mine"], ["--queue has no effect on this machine", "--with kubernetes"]),
        (["--rejection-top-p", "0.9"], ["--rejection-top-p applies to rejection sampling only"]),
    ],
)
def test_an_invalid_flag_is_refused_before_the_run(
    launch: Callable[..., FlowRun], arguments: list[str], expected: list[str]
) -> None:
    check_refused(launch("run", *arguments), *expected)


def test_a_flag_name_of_another_tool_is_refused_with_the_matching_flag(
    launch: Callable[..., FlowRun],
) -> None:
    run = launch("run", "--learning-rate=1e-5")
    assert run.returncode == 2
    assert run.output == "There is no option --learning-rate.\nDid you mean --lr?\n"


def test_a_model_that_cannot_fit_is_refused_with_alternatives(launch: Callable[..., FlowRun]) -> None:
    run = launch("run", "--model", "llama-8b")
    check_refused(run, "llama-8b", "--with kubernetes", "--with batch", "GiB")
    assert not (run.home / "cache" / "huggingface").exists()


def test_resume_without_a_stored_run_is_refused(launch: Callable[..., FlowRun]) -> None:
    check_refused(launch("resume"), "There is no run to resume", "--origin-run-id RUN")
    check_refused(launch("resume", "--origin-run-id", "17"), "Run 17 cannot be resumed")
    check_refused(launch("resume", "--origin-run-id=18"), "Run 18 cannot be resumed")
    check_refused(launch("resume", "--origin-run-id"), "--origin-run-id has no value")


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        "--model llama-8b",
        "--model codestral --method lora --engine deepspeed --set zero.stage=3 --set zero.offload=cpu "
        "--with kubernetes --gpu L4 --gpus 1 --nodes 1 --set seed=3",
        "--model llama-8b --method lora --micro-batch-size 8 --set activation_checkpointing=false "
        "--with batch --gpu L4 --gpus=1 --nodes 1",
    ],
)
def test_the_suggested_commands_are_accepted(launch: Callable[..., FlowRun], arguments: str) -> None:
    refused = launch("run", *shlex.split(arguments), "--plan-only")
    check_refused(refused, "Alternatives that fit:")
    offered = re.findall(r"^\s+finetune (run .*)$", refused.output, re.MULTILINE)
    assert len(offered) > 1
    for command in offered:
        words_of_command = shlex.split(
            command.partition(" --run-id-file")[0] + command.partition("run_id")[2]
        )
        accepted = launch(*words_of_command)
        assert accepted.returncode == 0, f"{command}: {accepted.output}"


@pytest.mark.parametrize(
    ("task", "lines", "expected"),
    [
        ("sft", [*[json.dumps(GOOD_ROW)] * 6, '{"messages": [', json.dumps(GOOD_ROW)], ["line 7", "JSON"]),
        ("dpo", [json.dumps({"prompt": "1 + 1?", "chosen": "2"})], ["line 1", "no `rejected` answer"]),
    ],
)
def test_a_broken_dataset_is_refused_before_the_run(
    launch: Callable[..., FlowRun], dataset: Path, task: str, lines: list[str], expected: list[str]
) -> None:
    dataset.write_text("".join(line + "\n" for line in lines))
    check_refused(launch("run", "--task", task, "--dataset", str(dataset)), *expected)


def test_a_model_folder_with_truncated_weights_is_refused(
    launch: Callable[..., FlowRun], tmp_path: Path
) -> None:
    model = tiny_llama.make(tmp_path / "model")
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100_000])
    check_refused(launch("run", "--model", str(model)), "truncated", "model.safetensors")


@pytest.mark.slow
@pytest.mark.nightly  # tests/launchers/models/test_fit.py compares the shapes
def test_weights_that_do_not_fit_their_config_are_refused_by_name(
    flow: Callable[..., FlowRun], tmp_path: Path
) -> None:
    model = tiny_llama.make(tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    config["num_hidden_layers"] += 1
    (model / "config.json").write_text(json.dumps(config))
    layer = f"model.layers.{config['num_hidden_layers'] - 1}."
    run = flow("run", "--model", str(model), timeout=120)
    assert run.returncode == 1, "a run that has begun and failed"
    assert "Traceback" not in run.output
    assert layer in run.output
    assert "train" not in re.findall(r"/(\w+)/\d+ \(pid", run.output), (
        "nothing is trained, and no GPU asked for"
    )


def test_packing_is_refused_if_documents_would_attend_to_each_other(
    launch: Callable[..., FlowRun], tmp_path: Path
) -> None:
    model = tiny_llama.make(tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    config |= {"model_type": "lfm2", "architectures": ["Lfm2ForCausalLM"]}
    config |= {"layer_types": ["conv", *["full_attention"] * (config["num_hidden_layers"] - 1)]}
    (model / "config.json").write_text(json.dumps(config))
    run = launch("run", "--model", str(model), "--packing", "true")
    check_refused(run, "packing: ", "lfm2")


def test_a_model_without_tokenizer_is_refused(launch: Callable[..., FlowRun], tmp_path: Path) -> None:
    model = tiny_llama.make(tmp_path / "model")
    (model / "tokenizer.json").unlink()
    check_refused(launch("run", "--model", str(model)), "tokenizer")


def test_an_unknown_hub_model_without_network_is_reported_in_one_line(launch: Callable[..., FlowRun]) -> None:
    check_refused(launch("run", "--model", "nobody/nothing"), "nobody/nothing")


def test_a_broken_settings_file_is_reported_in_one_line(
    launch: Callable[..., FlowRun], tmp_path: Path
) -> None:
    (tmp_path / "s.yaml").write_text("optimizer:\n  lr: fast\n")
    run = launch("--config", "settings", "s.yaml", "run")
    check_refused(run, "optimizer.lr", "fast")


@pytest.mark.parametrize("text", ["", "\n", "# model: llama-8b\n", "{}\n"])
def test_a_settings_file_without_settings_is_refused(
    launch: Callable[..., FlowRun], tmp_path: Path, text: str
) -> None:
    (tmp_path / "s.yaml").write_text(text)
    run = launch("--config", "settings", "s.yaml", "run", "--plan-only")
    check_refused(run, "s.yaml has no settings")


def test_plan_only_prints_the_plan_and_starts_nothing(launch: Callable[..., FlowRun]) -> None:
    run = launch("run", "--plan-only")
    assert run.returncode == 0, run.output
    assert "tiny-llama" in run.output
    assert "Workflow starting" not in run.output


def test_the_help_of_the_flow_file_equals_that_of_finetune_run(launch: Callable[..., FlowRun]) -> None:
    text = launch("run", "--help").output
    assert text.startswith("Usage: finetune run [FILE.yaml] [OPTIONS]")
    assert "--lora-rank N" in text
