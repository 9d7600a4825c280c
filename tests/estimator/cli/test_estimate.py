"""finetune estimate: an option for each field of a Setup, each engine's defaults, a line for each mistake."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from estimator import calibration, memory, models
from estimator.cli.app import app
from estimator.cli.defaults import ENGINES
from estimator.cli.options import PlaceOptions, SetupOptions, tokens_of
from estimator.cli.steps import setup_from
from estimator.errors import UserError
from estimator.setup import Engine, Setup


def run(*words: str) -> Result:
    return CliRunner().invoke(app, ["estimate", *words], prog_name="finetune")


def answer(*words: str) -> dict[str, Any]:
    done = run(*words, "--json")
    assert done.exit_code == 0, done.output
    return dict(json.loads(done.stdout))


def setup(gpus: int = 1, **values: Any) -> Setup:
    model = values.pop("model", "llama-8b")
    return setup_from(SetupOptions(model=model, **values), models.find(model), gpus)


# An option and a value of it that changes that field; processes_per_node is --gpus
CHANGES: dict[str, list[str]] = {
    "model": ["--model", "llama-3.2-1b"],
    "engine": ["--engine", "litgpt"],
    "engine_version": ["--engine", "torchtitan", "--engine-version", "2024-05"],
    "method": ["--method", "lora"],
    "task": ["--task", "dpo"],
    "lora_rank": ["--lora-rank", "64"],
    "lora_targets": ["--lora-targets", "q_proj,v_proj"],
    "trained_modules": ["--method", "lora", "--trained-modules", "lm_head"],
    "quantization": ["--method", "lora", "--quantization", "int8"],
    "upcast_frozen": ["--method", "qlora", "--upcast-frozen"],
    "precision": ["--precision", "bf16-autocast"],
    "fp8": ["--fp8", "tensorwise"],
    "optimizer": ["--optimizer", "adamw8bit"],
    "optimizer_in_backward": ["--optimizer-in-backward"],
    "sharding": ["--gpus", "2", "--sharding", "zero2"],
    "flat_parameters": ["--flat-parameters"],
    "shard": ["--gpus", "4", "--shard", "2"],
    "replicate": ["--gpus", "4", "--dp-replicate", "2"],
    "tensor": ["--gpus", "2", "--tp", "2"],
    "sequence_parallel": ["--no-sequence-parallel"],
    "context": ["--gpus", "2", "--cp", "2"],
    "pipeline": ["--gpus", "2", "--pp", "2"],
    "virtual_stages": ["--gpus", "2", "--pp", "2", "--virtual-stages", "2"],
    "schedule": ["--gpus", "2", "--pp", "2", "--schedule", "afab"],
    "expert": ["--model", "mixtral-8x7b", "--gpus", "2", "--ep", "2"],
    "micro_batch_size": ["--micro-batch-size", "3"],
    "accumulation": ["--accumulation", "3"],
    "seq_len": ["--seq-len", "512"],
    "fixed_length": ["--variable"],
    "longest_once": ["--longest-once"],
    "document_mask": ["--document-mask"],
    "checkpointing": ["--checkpointing", "none"],
    "activation_offload": ["--activation-offload"],
    "compile": ["--compile"],
    "loss": ["--loss", "plain"],
    "loss_chunks": ["--loss-chunks", "4"],
    "attention": ["--attention", "math"],
    "offload": ["--offload", "optimizer"],
    "offload_to": ["--offload", "optimizer", "--offload-to", "nvme"],
    "device": ["--device", "cpu"],
    "processes_per_node": ["--gpus", "4"],
    "keep_checkpoints": ["--keep-checkpoints", "5"],
}


def test_every_field_of_a_setup_has_its_option() -> None:
    assert set(CHANGES) == {field.name for field in dataclasses.fields(Setup)}


@pytest.mark.parametrize("field", CHANGES)
def test_an_option_sets_its_field(field: str) -> None:
    words = CHANGES[field] if "--model" in CHANGES[field] else ["--model", "llama-8b", *CHANGES[field]]
    plain = answer("--model", "llama-8b")["setup"]
    assert answer(*words)["setup"][field] != plain[field]


def test_the_answer_is_the_estimators_own() -> None:
    words = (
        "--model",
        "llama-8b",
        "--method",
        "lora",
        "--gpus",
        "8",
        "--seq-len",
        "4096",
        "--gpu",
        "H100 SXM",
    )
    found = answer(*words)
    own = memory.estimate(setup(8, method="lora", seq_len=4096))
    assert found["memory"]["categories"] == dict(own.categories)
    assert found["memory"]["upper_bytes"] == own.upper_bytes
    assert found["memory"]["fits"] is True
    assert found["speed"]["tokens_per_second"] > 0


def test_the_text_says_what_the_json_says() -> None:
    words = ("--model", "llama-8b", "--method", "qlora", "--gpu", "L4", "--tokens", "10M")
    found, text = answer(*words), run(*words).output
    assert f"{found['memory']['likely_bytes'] / 2**30:.2f} GiB likely" in text or (
        f"{found['memory']['likely_bytes'] / 2**30:.1f} GiB likely" in text
    )
    for name in found["memory"]["categories"]:
        assert name in text
    assert "fits" in text
    assert found["price"]["basis"].split(" (")[0] in " ".join(text.split())


def test_csv_has_one_row_whose_bytes_add_up() -> None:
    done = run("--model", "llama-8b", "--csv")
    (row,) = csv.DictReader(io.StringIO(done.stdout))
    outside = ("likely_bytes", "upper_bytes", "capacity_bytes", "host_bytes", "disk_bytes")
    parts = [int(value) for name, value in row.items() if name.endswith("_bytes") and name not in outside]
    assert sum(parts) == int(row["likely_bytes"])


def test_json_and_csv_at_once_are_refused() -> None:
    done = run("--model", "llama-8b", "--json", "--csv")
    assert done.exit_code == 1
    assert "--json and --csv" in done.stderr


@pytest.mark.parametrize("engine", Engine.__args__)  # type: ignore[attr-defined]
@pytest.mark.parametrize("method", ["full", "lora", "qlora", "dora", "qdora"])
def test_every_engine_has_defaults_that_make_a_setup(engine: str, method: str) -> None:
    assert ENGINES[engine].source
    for gpus in (1, 8):
        made = setup(gpus, engine=engine, method=method)
        assert made.world_size == gpus
        assert memory.estimate(made).likely_bytes > 0


def test_hours_and_price_follow_from_the_tokens() -> None:
    one = answer("--model", "llama-8b", "--gpu", "H100 SXM", "--gpus", "8", "--tokens", "100M")["price"]
    ten = answer("--model", "llama-8b", "--gpu", "H100 SXM", "--gpus", "8", "--tokens", "1B")["price"]
    assert ten["usd"] == pytest.approx(10 * one["usd"])
    assert one["usd"] == pytest.approx(one["hours"] * one["usd_per_hour"])


def test_an_instance_type_brings_its_gpus_network_and_price() -> None:
    found = answer("--model", "llama-8b", "--instance-type", "p5.48xlarge", "--nodes", "2")
    assert found["gpu"] == "H100 SXM"
    assert found["setup"]["processes_per_node"] == 8
    assert "2x p5.48xlarge" in found["price"]["basis"]
    assert found["speed"]["tokens_per_second"] is not None


def test_what_is_not_known_is_said_to_be_unknown() -> None:
    text = run("--model", "llama-8b").output
    assert "unknown" in text
    found = answer("--model", "llama-8b")
    assert found["memory"]["capacity_bytes"] is found["memory"]["fits"] is None
    assert found["price"]["usd_per_hour"] is found["speed"]["tokens_per_second"] is None


def test_a_table_of_ones_own_is_used(tmp_path: Path) -> None:
    table = tmp_path / "mine.csv"
    table.write_text("gpu,vendor,vram_GB\nMyGPU,nvidia,48\n")
    found = answer("--model", "llama-8b", "--gpu", "MyGPU", "--hardware", str(table))
    assert found["memory"]["capacity_bytes"] == pytest.approx(48e9, rel=0.08)


def test_bert_is_estimated_too() -> None:
    assert answer("--model", "bert-base", "--seq-len", "512")["memory"]["likely_bytes"] > 0


def test_a_diffusion_model_shows_what_is_known_and_what_is_not() -> None:
    found = answer("--model", "stable-diffusion-xl", "--gpu", "L4")
    assert found["memory"]["categories"]["weights"] == 2 * found["model"]["parameters"]
    assert found["memory"]["fits"] is False
    lora = answer("--model", "sdxl", "--method", "lora", "--gpu", "L4")
    assert lora["memory"]["categories"]["activations"] is None
    assert lora["memory"]["fits"] is None
    assert any("lora" in clause for clause in lora["unknown"])
    assert "unknown" in run("--model", "sdxl", "--method", "lora").output
    twice = answer("--model", "sdxl", "--image-size", "512")["memory"]["categories"]["activations"]
    assert twice < found["memory"]["categories"]["activations"]


WRONG: list[tuple[list[str], str]] = [
    (["--model", "lama-8b"], "There is no model 'lama-8b'"),
    (["--model", "no/such-model"], "neither in the model table nor in the local cache"),
    (["--gpus", "8", "--tp", "3"], "can't be divided by --tp x --pp x --cp = 3"),
    (["--gpus", "24", "--tp", "24"], "tensor parallel 24 does not divide the 32 attention heads"),
    (["--micro-batch-size", "0"], "micro_batch_size = 0 must be a whole number above 0"),
    (["--gpus", "0"], "--gpus 0 must be a whole number above 0"),
    (["--nodes", "-1"], "--nodes -1 must be a whole number above 0"),
    (["--lora-rank", "0", "--method", "lora"], "lora_rank = 0 must be a whole number above 0"),
    (["--gpu", "H1000"], "There is no GPU 'H1000'"),
    (["--engine", "tune"], "--engine tune is not known"),
    (["--engine-version", "0.1"], "--engine-version 0.1 of torchtune is not known"),
    (["--method", "lorra"], "--method lorra is not known"),
    (["--optimizer", "adam"], "optimizer = 'adam' is not known"),
    (["--quantization", "nf4"], "quantization nf4 freezes the weights"),
    (["--method", "qlora", "--quantization", "none"], "--quantization none asks for none"),
    (["--method", "lora", "--lora-targets", "query"], "LoRA target 'query'"),
    (["--method", "lora", "--lora-targets", ","], "--lora-targets is empty"),
    (["--instance-type", "p5.48xlarges"], "There is no instance type 'p5.48xlarges'"),
    (["--instance-type", "p5.48xlarge", "--gpu", "L4"], "is not the GPU of --instance-type"),
    (["--instance-type", "p5.48xlarge", "--gpus", "16"], "--gpus 16: p5.48xlarge has 8"),
    (["--device", "cpu", "--gpu", "L4"], "--device cpu and L4 contradict each other"),
    (["--tokens", "many"], "--tokens many is not a number of tokens"),
    (["--tokens", "-1"], "--tokens -1 is not a number of tokens"),
    (["--busbw-intra", "-5"], "--busbw-intra -5 must be above 0"),
    (["--network-gbps", "0"], "--network-gbps 0 must be above 0"),
    (["--gpus", "8", "--shard", "3"], "--shard 3 x --dp-replicate"),
    (["--ep", "2", "--gpus", "2"], "expert parallel 2 does not divide the 0 experts"),
    (["--pp", "64", "--gpus", "64"], "is more than the 32 layers"),
    (["--hardware", "none.csv"], "none.csv"),
]


@pytest.mark.parametrize(("words", "line"), WRONG, ids=lambda value: " ".join(value)[:40])
def test_a_wrong_value_is_named_in_one_clear_line(words: list[str], line: str) -> None:
    model = [] if "--model" in words else ["--model", "llama-8b"]
    done = run(*model, *words)
    assert done.exit_code == 1, done.output
    assert line in done.stderr.splitlines()[0]
    assert len(done.stderr.splitlines()) <= 3
    assert done.stdout == ""


def test_a_table_with_a_wrong_unit_is_named_by_its_cell(tmp_path: Path) -> None:
    table = tmp_path / "mine.csv"
    table.write_text("gpu,vendor,vram_GB\nMyGPU,nvidia,49152\n")
    done = run("--model", "llama-8b", "--gpu", "MyGPU", "--hardware", str(table))
    assert done.exit_code == 1
    assert "49152" in done.stderr


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"hidden_size": None}, "has no hidden_size"),
        ({"num_key_value_heads": 5}, "32 attention heads can't be shared by 5"),
    ],
)
def test_a_config_json_that_lacks_or_contradicts_is_named(
    tmp_path: Path, change: dict[str, Any], line: str
) -> None:
    config = {
        "model_type": "llama",
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_hidden_layers": 4,
        "intermediate_size": 8192,
        "vocab_size": 1000,
        "max_position_embeddings": 2048,
    } | change
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    done = run("--model", str(tmp_path))
    assert done.exit_code == 1
    assert line in done.stderr


@pytest.mark.parametrize(
    ("text", "tokens"), [("250M", 250e6), ("1.5B", 1.5e9), ("1e9", 1e9), ("10_000", 1e4), ("2T", 2e12)]
)
def test_numbers_of_tokens_are_read_as_people_write_them(text: str, tokens: float) -> None:
    assert tokens_of(text) == tokens


def test_finished_runs_correct_the_estimate_and_are_named(
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
    assert after["memory"]["likely_bytes"] == pytest.approx(
        before["memory"]["likely_bytes"] * 1.1 ** (3 / 5), rel=1e-6
    )
    assert after["calibration"]["runs"] == 3
    assert "calibrated on 3 runs: x1.06" in run(*words).output
    assert answer(*words, "--no-calibration") == before


def test_a_damaged_line_of_the_store_is_told_beside_the_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(calibration.VARIABLE, str(tmp_path / "runs.jsonl"))
    (tmp_path / "runs.jsonl").write_text("half a li\n")
    done = run("--model", "llama-8b", "--json")
    assert done.exit_code == 0
    assert "line 1, is left out" in done.stderr
    assert json.loads(done.stdout)["calibration"] is None


def test_a_gpu_count_below_one_is_refused_before_anything_else() -> None:
    with pytest.raises(UserError, match="--gpus 0"):
        setup(0)


def test_options_of_a_place_have_no_setup_fields_in_them() -> None:
    place = {field.name for field in dataclasses.fields(PlaceOptions)}
    assert place & {field.name for field in dataclasses.fields(SetupOptions)} == set()


def test_exact_mode_stands_beside_the_formulas() -> None:
    found = answer("--model", "tiny-llama", "--seq-len", "128", "--exact")
    assert found["exact"]["peak_bytes"] == sum(found["exact"]["categories"].values())
    assert found["exact"]["categories"]["weights"] == found["memory"]["categories"]["weights"]
    text = " ".join(run("--model", "tiny-llama", "--seq-len", "128", "--exact").output.split())
    assert "category formula exact" in text
    assert "torchtune 0.6" in text


def test_what_exact_mode_can_not_trace_is_said_before_torch_is_loaded() -> None:
    done = run("--model", "llama-8b", "--engine", "megatron", "--exact")
    assert done.exit_code == 1
    assert "Exact mode can't trace this" in done.stderr


def test_the_layout_and_the_step_are_said_in_words() -> None:
    words = ("--model", "llama-70b", "--gpus", "8", "--nodes", "4", "--tp", "2", "--pp", "2", "--cp", "2")
    text = " ".join(run(*words, "--dp-replicate", "2", "--seq-len", "262144").output.split())
    assert "32 process(es), 4 node(s) of 8x GPU, fsdp 4, replicas 2, tensor parallel 2" in text
    assert "context parallel 2, pipeline 2, schedule 1f1b" in text
    assert "longer than the 131,072 tokens that llama-70b was made for" in text


def test_on_a_cpu_processes_are_counted_instead_of_gpus() -> None:
    text = run("--model", "tiny-llama", "--device", "cpu", "--gpus", "2").output
    assert "2x CPU" in text
    assert "Memory of one process" in text
    assert "precision fp32" in text


def test_measured_bandwidth_replaces_the_data_sheets() -> None:
    words = ("--model", "llama-70b", "--gpus", "8", "--gpu", "H100 SXM")
    slow = answer(*words, "--busbw-intra", "2")["speed"]
    assert slow["tokens_per_second"] < answer(*words)["speed"]["tokens_per_second"]
    assert "as measured" in slow["basis"]
