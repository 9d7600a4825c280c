"""finetune estimate --breakdown: which values it varies, what it refuses, what it writes."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from estimator.cli.app import app
from estimator.cli.breakdown import OVER
from tests.estimator.test_charts import rectangles


def run(*words: str) -> Result:
    return CliRunner().invoke(app, ["estimate", "--breakdown", *words], prog_name="finetune")


@pytest.mark.parametrize("over", OVER)
def test_every_option_that_can_be_varied_has_values_that_work(over: str) -> None:
    model = "mixtral-8x7b" if over == "ep" else "llama-8b"
    method = ["--method", "lora"] if over == "lora_rank" else []
    gpus = ["--gpus", "8"] if over not in ("gpus", "nodes") else []
    gpus += ["--micro-batch-size", "4"] if over == "loss" else []  # else another moment decides
    done = run("--model", model, "--over", over, *method, *gpus, "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert len(found["bars"]) >= 2
    assert found["impossible"] == {}
    assert len({bar["memory"]["needs_bytes"] for bar in found["bars"]}) > 1


def test_memory_does_not_fall_with_the_micro_batch() -> None:
    done = run("--model", "llama-8b", "--over", "micro-batch-size", "--values", "1,2,4", "--csv")
    sizes = [int(row["needs_upper_bytes"]) for row in csv.DictReader(io.StringIO(done.stdout))]
    assert sizes == sorted(sizes)
    assert len(sizes) == 3


def test_impossible_values_are_reported_and_the_others_drawn() -> None:
    done = run("--model", "llama-8b", "--gpus", "8", "--over", "tp", "--values", "1,3")
    assert done.exit_code == 0
    assert "tp 3: 8 processes are not divisible" in done.stderr
    assert "tp 1" in done.stdout


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--over", "tp", "--values", "two"], "--values two must be a whole number"),
        (["--over", "tp", "--values", ","], "contains no value"),
        (["--values", "1,2"], "needs --over"),
        (["--over", "tp", "--values", "3,5", "--gpus", "8"], "are not divisible"),
        (["--svg", "no/such/folder/x.svg"], "Cannot write"),
    ],
    ids=lambda value: " ".join(value)[:30],
)
def test_a_wrong_value_is_named_in_one_clear_line(words: list[str], line: str) -> None:
    done = run("--model", "llama-8b", *words)
    assert done.exit_code == 2, done.output
    assert line in done.stderr.splitlines()[0]
    assert done.stdout == ""


def test_svg_and_page_are_written_to_the_given_paths(tmp_path: Path) -> None:
    drawing, page = tmp_path / "bars.svg", tmp_path / "bars.html"
    done = run("--model", "llama-8b", "--gpu", "L4", "--svg", str(drawing), "--html", str(page))
    assert done.exit_code == 0, done.output
    assert len(rectangles(drawing.read_text())) >= 4
    assert "<table>" in page.read_text()
    assert "L4" in page.read_text()
