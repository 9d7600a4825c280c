"""finetune estimate: the answer as text, JSON and CSV, and a line for each mistake."""

from __future__ import annotations

import csv
import functools
import io
from pathlib import Path

import pytest

from estimator import calibration, exact, memory
from estimator.formatting import format_bytes
from tests.estimator.cli.estimates import answer, run, setup


def test_json_has_the_values_of_the_estimator() -> None:
    response = answer(
        "--model", "llama-8b", "--method", "lora", "--gpus", "8", "--seq-len", "4096", "--gpu", "H100 SXM"
    )
    own = memory.estimate(setup(8, method="lora", seq_len=4096))
    assert response["memory"]["categories"] == dict(own.categories)
    assert response["memory"]["needs_bytes"] == own.needs_bytes
    assert response["memory"]["shows_range"] == list(own.shows_range)
    assert response["memory"]["verdict"] == "fits"
    assert response["speed"]["tokens_per_second"] > 0


def test_text_and_json_have_the_same_figures() -> None:
    words = ("--model", "llama-8b", "--method", "qlora", "--gpu", "L4", "--tokens", "10M")
    found, text = answer(*words), run(*words).output
    assert f"Needs {format_bytes(found['memory']['needs_bytes'])}" in text
    assert f"to show {format_bytes(found['memory']['shows_bytes'])}" in text
    for name in found["memory"]["categories"]:
        assert name in text
    assert "fits" in text
    assert found["price"]["basis"].split(" (")[0] in " ".join(text.split())


def test_csv_has_one_row_and_its_categories_sum_to_the_total() -> None:
    done = run("--model", "llama-8b", "--csv")
    (row,) = csv.DictReader(io.StringIO(done.stdout))
    figures = ("needs_bytes", "needs_upper_bytes", "shows_bytes", "shows_upper_bytes")
    outside = (*figures, "capacity_bytes", "host_bytes", "disk_bytes")
    parts = [int(value) for name, value in row.items() if name.endswith("_bytes") and name not in outside]
    assert sum(parts) == int(row["needs_bytes"])


def test_an_instance_type_sets_gpus_network_and_price() -> None:
    response = answer("--model", "llama-8b", "--instance-type", "p5.48xlarge", "--nodes", "2")
    assert (response["gpu"], response["setup"]["processes_per_node"]) == ("H100 SXM", 8)
    assert "2x p5.48xlarge" in response["price"]["basis"]
    assert response["speed"]["tokens_per_second"] is not None


def test_a_mask_instead_of_variable_length_attention_takes_more_memory_and_time() -> None:
    words = (
        "--model",
        "llama-8b",
        "--engine",
        "fsdp2",
        "--seq-len",
        "8192",
        "--packing",
        "--gpu",
        "H100 SXM",
    )
    kernel, mask = answer(*words, "--variable-length"), answer(*words, "--no-variable-length")
    assert answer(*words) == kernel
    assert mask["memory"]["needs_bytes"] > kernel["memory"]["needs_bytes"]
    assert mask["speed"]["tokens_per_second"] < 0.8 * kernel["speed"]["tokens_per_second"]


def test_unknown_figures_are_shown_as_unknown() -> None:
    text = run("--model", "llama-8b").output
    assert "unknown" in text
    response = answer("--model", "llama-8b")
    assert response["memory"]["capacity_bytes"] is response["memory"]["verdict"] is None
    assert response["price"]["usd_per_hour"] is response["speed"]["tokens_per_second"] is None


def test_a_hardware_file_of_the_user_defines_a_gpu(tmp_path: Path) -> None:
    table = tmp_path / "mine.csv"
    table.write_text("gpu,vendor,vram_GB\nMyGPU,nvidia,48\n")
    response = answer("--model", "llama-8b", "--gpu", "MyGPU", "--hardware", str(table))
    assert response["memory"]["capacity_bytes"] == pytest.approx(48e9, rel=0.08)


WRONG: list[tuple[list[str], str]] = [
    (["--model", "no/such-model"], "neither in the model table nor in the local cache"),
    (["--gpus", "8", "--tp", "3"], "are not divisible by --tp x --pp x --cp = 3"),
    (["--gpus", "24", "--tp", "24"], "tensor parallel 24 does not divide the 32 attention heads"),
    (["--micro-batch-size", "0"], "--micro-batch-size 0 must be a whole number above 0"),
    (["--gpus", "0"], "--gpus 0 must be a whole number above 0"),
    (["--engine", "tune"], "--engine tune is not known"),
    (["--engine-version", "0.1"], "--engine-version 0.1 of torchtune is not known"),
    (["--optimizer", "adam"], "--optimizer adam is not known"),
    (["--method", "full", "--quantization", "nf4"], "quantization nf4 freezes the weights"),
    (["--method", "qlora", "--quantization", "none"], "--quantization none disables"),
    (["--method", "lora", "--lora-targets", "query"], "LoRA target 'query'"),
    (["--method", "lora", "--lora-targets", ","], "--lora-targets is empty"),
    (["--instance-type", "p5.48xlarge", "--gpu", "L4"], "is not the GPU of --instance-type"),
    (["--instance-type", "p5.48xlarge", "--gpus", "16"], "--gpus 16: p5.48xlarge has 8"),
    (["--device", "cpu", "--gpu", "L4"], "--device cpu and L4 contradict each other"),
    (["--tokens", "many"], "--tokens many is not a number of tokens"),
    (["--busbw-intra", "-5"], "--busbw-intra -5 must be above 0"),
    (["--gpus", "8", "--shard", "3"], "--shard 3 x --dp-replicate"),
    (["--ep", "2", "--gpus", "2"], "expert parallel 2 does not divide the 0 experts"),
    (["--pp", "64", "--gpus", "64"], "is more than the 32 layers"),
    (["--hardware", "none.csv"], "none.csv"),
]


@pytest.mark.parametrize(("words", "line"), WRONG, ids=lambda value: " ".join(value)[:40])
def test_a_wrong_value_is_named_in_one_clear_line(words: list[str], line: str) -> None:
    model = [] if "--model" in words else ["--model", "llama-8b"]
    done = run(*model, *words)
    assert done.exit_code == 2, done.output
    assert line in done.stderr.splitlines()[0]
    assert len(done.stderr.splitlines()) <= 3
    assert done.stdout == ""


def test_finished_runs_correct_the_estimate_and_the_output_names_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(calibration.VARIABLE, str(tmp_path / "runs.jsonl"))
    words = ("--model", "llama-8b", "--method", "lora", "--gpus", "8", "--gpu", "H100 SXM")
    before = answer(*words)
    for run_name in ("a", "b", "c"):
        calibration.Store().add(
            calibration.Finished(
                engine="torchtune",
                method="lora",
                gpu="H100 SXM",
                model="llama-8b",
                setup="",
                formulas=calibration.formulas("torchtune", "lora"),
                predicted_bytes=10**10,
                predicted_upper_bytes=12 * 10**9,
                measured_bytes=11 * 10**9,
                measured_kind="device",
                date="2026-01-02T03:04:05+00:00",
                run=run_name,
            )
        )
    after = answer(*words)
    assert after["memory"]["shows_bytes"] == pytest.approx(
        before["memory"]["shows_bytes"] * 1.1 ** (3 / 5), rel=1e-6
    )
    assert after["memory"]["needs_bytes"] == before["memory"]["needs_bytes"]  # no tensors were counted
    assert after["calibration"]["runs"] == 3
    assert "calibrated on 3 runs: scaled by 1.06" in run(*words).output
    assert answer(*words, "--no-calibration") == before


@pytest.mark.slow
def test_exact_mode_is_shown_next_to_the_formulas(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.setattr(exact, "estimate", functools.cache(exact.estimate))
    response = answer("--model", "tiny-llama", "--seq-len", "128", "--exact")
    assert response["exact"]["peak_bytes"] == sum(response["exact"]["categories"].values())
    assert response["exact"]["categories"]["weights"] == response["memory"]["categories"]["weights"]
    text = " ".join(run("--model", "tiny-llama", "--seq-len", "128", "--exact").output.split())
    assert "category formula exact" in text
    assert "torchtune 0.6" in text


def test_exact_mode_refuses_unsupported_setups_before_torch_is_loaded() -> None:
    done = run("--model", "llama-8b", "--engine", "megatron", "--exact")
    assert done.exit_code == 2
    assert "Exact mode cannot trace this step" in done.stderr


def test_the_text_describes_the_layout_and_the_step() -> None:
    words = ("--model", "llama-70b", "--gpus", "8", "--nodes", "4", "--tp", "2", "--pp", "2", "--cp", "2")
    text = " ".join(run(*words, "--dp-replicate", "2", "--seq-len", "262144").output.split())
    assert "32 processes, 4 nodes of 8x GPU, fsdp 4, replicas 2, tensor parallel 2" in text
    assert "context parallel 2, pipeline 2, schedule 1f1b" in text
    assert "longer than the 131,072 tokens that llama-70b supports" in text


def test_on_a_cpu_processes_are_counted_instead_of_gpus() -> None:
    text = run("--model", "tiny-llama", "--device", "cpu", "--gpus", "2").output
    for words in ("2x CPU", "Memory of one process", "precision fp32"):
        assert words in text


def test_the_default_method_is_the_first_that_fits_the_gpu() -> None:
    rows = {gpu: answer("--model", "llama-8b", "--gpu", gpu)["setup"] for gpu in ("B200", "L40S", "T4")}
    assert [(row["method"], row["quantization"]) for row in rows.values()] == [
        ("full", "none"),
        ("lora", "none"),
        ("lora", "nf4-double"),
    ]


@pytest.mark.parametrize(
    ("words", "defaults"),
    [
        ("--engine fsdp2", (True, True, "fused")),
        ("--engine deepspeed", (True, True, "fused")),
        ("--engine fsdp2 --no-compile", (True, False, "fused")),
        ("--engine fsdp2 --loss plain", (True, True, "plain")),
        ("--engine fsdp2 --no-packing", (False, False, "fused")),
        ("--engine fsdp2 --gpu T4", (False, False, "recomputed")),
        ("--engine fsdp2 --device cpu", (False, False, "recomputed")),
        ("--engine transformers", (False, False, "plain")),
        ("--engine torchtune --optimizer adamw4bit", (True, False, "chunked")),
    ],
)
def test_packing_compile_and_liger_default_to_the_choices_of_the_planner(
    words: str, defaults: tuple[bool, bool, str]
) -> None:
    found = answer("--model", "llama-8b", "--method", "lora", *words.split())["setup"]
    assert (found["fixed_length"], found["compile"], found["loss"]) == defaults
    if "T4" in words:
        assert found["precision"] == "fp16-mixed"


def test_the_text_lists_values_set_by_default() -> None:
    words = ("--model", "llama-8b", "--engine", "fsdp2", "--method", "lora")
    assert "compiled, Liger-Kernel" in " ".join(run(*words).output.split())
    assert "Liger-Kernel" not in run(*words, "--loss", "plain").output
