"""finetune plan as its users meet it."""

from __future__ import annotations

import csv
import io
import json
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from estimator import Plan, hardware
from estimator.cli.app import app
from estimator.hardware import local_machine


def run(text: str) -> Result:
    return CliRunner().invoke(app, ["plan", *shlex.split(text)], prog_name="finetune")


@pytest.fixture(autouse=True)
def no_history(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setenv("FINETUNE_CALIBRATION", str(tmp_path / "runs.jsonl"))


def test_with_only_a_model_the_output_has_ranking_best_plan_and_rejections() -> None:
    result = run("--model llama-70b --global-batch-size 64 --verbose")
    assert result.exit_code == 0
    for words in ("Order: ", "Plan: llama-70b, full", "Why", "Rejected", "% over", "learning rate"):
        assert words in result.stdout
    assert max(len(line) for line in result.stdout.splitlines()) <= 80


def test_json_has_all_plans_in_order_and_each_can_be_parsed() -> None:
    answer = json.loads(run("--model llama-8b --method lora --json --top 3").stdout)
    made = [Plan.from_json(json.dumps(plan)) for plan in answer["plans"]]
    assert len(made) == 3
    assert [row["rank"] for row in answer["summary"]] == [1, 2, 3]
    assert answer["summary"][0]["needs_bytes"] == made[0].prediction.memory.needs_bytes
    assert {"what", "reason", "kind", "over"} == set(answer["rejected"][0])


def test_csv_has_one_row_for_each_plan() -> None:
    rows = list(csv.DictReader(io.StringIO(run("--model llama-8b --method lora --csv --top 4").stdout)))
    assert [row["rank"] for row in rows] == ["1", "2", "3", "4"]
    assert all(float(row["usd_per_million_tokens"]) > 0 for row in rows)


def test_goal_options_reach_the_planner() -> None:
    clouds = "--cloud aws --cloud gcp"
    goal = "--global-batch-size 64 --tokens 1B --deadline-hours 3"
    text = f"--model llama-8b --method lora {goal} {clouds} --json"
    answer = json.loads(run(text).stdout)
    assert "within 3 h" in answer["order"]
    assert all(row["hours"] <= 3 for row in answer["summary"])


@pytest.mark.parametrize(
    ("text", "words", "status"),
    [
        ("--model llama-8b --deadline-hours 1", "--tokens", 2),
        ("--model llama-8b --context here", "--context needs --from-cluster", 2),
        ("--model llama-8b --namespace x", "--namespace needs --from-cluster", 2),
        ("--model llama-8b --json --csv", "exclude each other", 2),
        ("--model llama-8b --method lora --gpu L4 --tokens 1B --budget-usd 1", "the cheapest is $", 1),
        ("--model llama-70b --gpu L4 --gpus 1 --nodes 1", "% over", 1),
    ],
)
def test_a_user_error_exits_with_2_and_a_job_that_fits_nowhere_with_1(
    text: str, words: str, status: int
) -> None:
    result = run(text)
    assert result.exit_code == status
    assert words in " ".join(result.stderr.split())
    assert "Traceback" not in result.stderr
    assert not result.stdout


@pytest.mark.parametrize(
    "text",
    [
        "--model llama-70b --gpu L4 --max-gpus 2",
        "--model llama-70b --engine deepspeed --zero-stage 3 --zero-offload cpu --method full --gpu L4 "
        "--gpus 1",
        "--model llama-8b --method lora --micro-batch-size=8 --seq-len 8192 --gpu L4 --gpus 1 --nodes 1",
        "--model llama-8b --method lora --no-activation-checkpointing --seq-len 8192 --gpu L4 --gpus 1",
        "--model llama-8b --tokens 1B --deadline-hours 0.5 --method lora --gpu H100 --global-batch-size 16",
        "--model llama-8b --tokens 1B --budget-usd 1 --method lora --gpu L40S",
    ],
)
def test_suggested_commands_succeed(text: str) -> None:
    result = run(text)
    offered = [line for line in result.stderr.splitlines() if line.startswith("  finetune plan")]
    assert offered
    for line in offered:
        assert CliRunner().invoke(app, shlex.split(line)[1:]).exit_code == 0


@pytest.mark.parametrize(("option", "engine"), [("zero", "deepspeed"), ("fsdp", "fsdp2")])
def test_an_offload_is_planned_with_the_engine_that_has_it(option: str, engine: str) -> None:
    named = "--model llama-8b --gpu L40S --gpus 1 --nodes 1"
    assert f"full with {engine} " in run(f"{named} --{option}-offload cpu").stdout.splitlines()[0]
    both = run(f"{named} --zero-offload cpu --fsdp-offload cpu")
    assert (both.exit_code, both.stderr) == (
        2,
        "--zero-offload and --fsdp-offload contradict each other.\nRemove one of them.\n",
    )


@pytest.mark.parametrize(
    ("text", "advised"),
    [
        ("--engine torchtune --zero-stage 3", "--zero-stage 3 --engine deepspeed"),
        (
            "--method full --engine deepspeed --zero-stage 0 --zero-offload cpu",
            "--engine deepspeed --zero-offload cpu",
        ),
        ("--engine torchtune --precision bf16-mixed", "--precision bf16"),
        ("--engine torchtune --tp 2", "--engine torchtitan --tp 2"),
        ("--micro-batch-size 3 --global-batch-size 16", "--micro-batch-size 3 --global-batch-size 15"),
    ],
)
def test_advised_options_are_valid(text: str, advised: str) -> None:
    refused = run(f"--model llama-8b {text}").stderr
    named = set(re.findall(r"--[a-z-]+", refused))
    known = set(re.findall(r"--[a-z-]+", CliRunner().invoke(app, ["plan", "--help-all"]).stdout))
    assert named
    assert named <= known, refused
    assert run(f"--model llama-8b {advised}").exit_code == 0


DOCUMENT = (Path(__file__).parents[3] / "docs" / "planning.md").read_text()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("--model llama-8b --task text-to-image", "llama-8b does not generate images"),
        ("--model sdxl --task dpo", "stable-diffusion-xl generates images"),
        ("--model llama-8b --vision frozen", "llama-8b sees no images"),
        ("--model llama-8b --interruption-rate 0.1", "--interruption-rate needs --spot"),
    ],
)
def test_an_option_that_cannot_apply_is_refused_instead_of_ignored(text: str, problem: str) -> None:
    result = run(text)
    assert result.exit_code == 2
    assert problem in result.stderr
    assert len(result.stderr.strip().splitlines()) == 2


def test_the_table_compares_price_and_time_of_the_job_if_its_size_is_known() -> None:
    options = "--model llama-8b --method lora --tokens 10M --top 5"
    rows = list(csv.DictReader(io.StringIO(run(f"{options} --csv").stdout)))
    table = run(f"{options} --verbose").stdout
    assert len(rows) == 5
    for row in rows[1:]:
        change = float(row["usd"]) / float(rows[0]["usd"]) - 1
        if abs(change) > 0.02:
            word = "more expensive" if change > 0 else "cheaper"
            assert re.search(rf"{abs(change) * 100:.{int(abs(change) < 0.1)}f} % {word},", table)


@pytest.mark.parametrize("line", re.findall(r"`finetune (plan .*?)`", DOCUMENT))
def test_commands_of_the_documentation_succeed(
    line: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    result = CliRunner().invoke(app, shlex.split(line), prog_name="finetune")
    if "--from-cluster" in line:
        assert "There is no kubeconfig" in result.stderr
    elif "--hardware" in line:
        assert "mine.csv cannot be read" in result.stderr
    else:
        assert result.exit_code == 0, result.stderr


def test_plans_that_cannot_be_launched_name_an_engine_that_can() -> None:
    first = " ".join(run("--model qwen-7b --method lora").stdout.split())
    assert first.startswith("None of these plans can be launched: no engine of this package can")
    parallel = " ".join(run("--model llama-8b --method lora --engine megatron").stdout.split())
    assert parallel.startswith(
        "None of these plans can be launched: engine megatron is planned only; this package can "
        "launch it with engine torchtune."
    )
    usual = json.loads(run("--model llama-8b --method lora --json").stdout)
    assert not any(plan["planned_only"] for plan in usual["plans"])


def test_a_note_names_a_much_faster_plan_of_about_the_same_price() -> None:
    answer = json.loads(run("--model llama-8b --method full --json").stdout)
    first, *others = answer["summary"]
    worth = [
        row
        for row in others
        if row["tokens_per_second"] > 2 * first["tokens_per_second"]
        and row["usd_per_million_tokens"] < 1.2 * first["usd_per_million_tokens"]
    ]
    pointed = [line for line in answer["notes"] if "times as fast" in line]
    assert bool(pointed) == bool(worth)


@pytest.mark.parametrize(
    ("options", "method"),
    [("", "full"), ("--lora-rank 16", "lora"), ("--adapter-only", "lora"), ("--quantization nf4", "qlora")],
)
def test_an_option_of_adapters_excludes_full_training_from_method_auto(options: str, method: str) -> None:
    [row] = json.loads(run(f"--model llama-8b --gpu H100 --top 1 --json {options}").stdout)["summary"]
    assert row["method"] == method


def test_a_gpu_that_no_instance_type_has_is_planned_without_price_and_machine() -> None:
    result = run("--model llama-8b --method qlora --gpu rtx-4090 --gpus 2 --json")
    [plan] = json.loads(result.stdout)["plans"]
    assert (plan["request"]["gpu_type"], plan["request"]["gpus_per_node"]) == ("RTX 4090", 2)
    assert plan["request"]["instance_type"] is None
    assert plan["prediction"]["usd_per_hour"] is None
    assert plan["prediction"]["start_up"] is None
    assert plan["prediction"]["tokens_per_second"] > 0
    several = json.loads(run("--model llama-8b --method qlora --gpu 'RTX 3090' --json").stdout)["plans"]
    assert len({plan["request"]["gpus_per_node"] for plan in several}) > 1
    assert "RTX 4090" in run("--model llama-8b --gpu 'RTX 4080'").stderr


@pytest.mark.parametrize("name", ["MI300X", "tpu", "TPU v5e", "Apple M3 Max", "Gaudi 3"])
def test_an_accelerator_without_cuda_is_refused(name: str) -> None:
    problem, advice = run(f"--model llama-8b --gpu '{name}'").stderr.splitlines()
    assert problem.endswith("is not an NVIDIA GPU.")
    assert "CUDA" in advice


def test_a_tesla_gpu_with_the_name_of_an_apple_chip_is_unknown() -> None:
    assert "is not an NVIDIA GPU" not in run("--model llama-8b --gpu 'Tesla M4'").stderr


def test_a_plan_on_several_nodes_says_that_gpus_are_counted_per_node() -> None:
    options = "--model llama-8b --method full --gpu H100 --gpus 1"
    assert "this plan has 2 nodes. Add --nodes 1" in " ".join(run(options).stdout.split())
    assert "Add --nodes 1" not in run(f"{options} --nodes 1").stdout


def test_a_default_batch_that_limits_the_gpus_is_named() -> None:
    options = "--model qwen3-4b --method full --prefer speed --max-gpus 64"
    assert "The default batch of 16 sequences allows at most 16 data-parallel GPUs" in run(options).stdout
    assert "The default batch" not in run(f"{options} --global-batch-size 64").stdout


def test_plan_uses_the_local_gpus_unless_an_option_names_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    card = ("NVIDIA GeForce RTX 4090", 24 * 2**30)
    monkeypatch.setattr(local_machine, "_gpus", lambda: (card, card))
    result = run("--model llama-8b --method qlora --json")
    [plan] = json.loads(result.stdout)["plans"]
    assert (plan["target"], plan["request"]["gpus_per_node"]) == ("local", 2)
    command = json.loads(result.stdout)["command"]
    assert command.startswith("finetune run --model llama-8b")
    assert "--with" not in command
    for elsewhere in ("--gpu A10G", "--no-here", "--max-gpus 4", "--cloud aws"):
        plans = json.loads(run(f"--model llama-8b --method qlora {elsewhere} --json").stdout)["plans"]
        assert plans[0]["target"] == "catalogue"
    too_large = run("--model llama-70b --method full")
    assert "finetune plan --model llama-70b --method full --no-here" in too_large.stderr
    monkeypatch.setattr(local_machine, "_gpus", tuple)
    assert json.loads(run("--model llama-8b --json").stdout)["plans"][0]["target"] == "catalogue"
    assert "no GPU" in run("--model llama-8b --here").stderr
    assert "contradict" in run("--model llama-8b --here --spot").stderr


def test_an_ambiguous_gpu_name_matches_all_variants() -> None:
    result = run("--model llama-8b --method lora --gpu A100 --top 8 --json")
    assert result.exit_code == 0
    gpus = {row["gpu_type"] for row in json.loads(result.stdout)["summary"]}
    assert len(gpus) > 1
    assert all(name.startswith("A100 ") for name in gpus)


def test_old_prices_are_reported_once_on_standard_error() -> None:
    result = run("--model llama-8b --method lora --gpu A10G --json")
    reported = [line for line in result.stderr.splitlines() if "days old" in line]
    assert reported == [hardware.old_prices(["g5.xlarge"])]
    assert reported[0].startswith("Prices of 2026-07-20 are ")
    assert "days old" not in result.stdout


def test_expensive_full_training_mentions_lora() -> None:
    hint = "compare with --method lora"
    for task in ("sft", "grpo"):
        assert hint in " ".join(run(f"--model qwen2.5-7b --task {task} --no-here").stdout.split()), task
    for options in ("--method full", "--method lora", "--gpu H100 --gpus 8 --nodes 1"):
        assert hint not in " ".join(run(f"--model qwen2.5-7b --no-here {options}").stdout.split()), options
