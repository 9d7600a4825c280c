"""``python -m benchmarks.on_gpu``: a complete session on the CPU of this machine, and user errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.on_gpu.__main__ import main
from benchmarks.published import scoring

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("expected", "problem"),
    [
        (("--minutes", "0"), "--minutes 0 is not possible."),
        (("--model", "mixtral-8x7b"), "mixtral-8x7b (mixtral) cannot be generated with random weights"),
    ],
)
def test_a_user_error_is_two_lines_with_advice(
    expected: tuple[str, ...],
    problem: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["on_gpu", *expected, "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    errors = capsys.readouterr().err
    assert problem in errors
    assert len(errors.strip().splitlines()) == 2
    assert not list(tmp_path.glob("out/*"))


@pytest.mark.slow
@pytest.mark.nightly
def test_a_cpu_rehearsal_runs_and_scores_the_same_cases_with_tiny_shapes(tmp_path: Path) -> None:
    """Run QLoRA under DeepSpeed, also below memory limits."""
    arguments = "qlora deepspeed varying drawn off"
    options = ["--minutes", "9", "--only", arguments, "--resolution", "0.3", "--out", str(tmp_path / "out")]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.on_gpu", *options],
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "FINETUNE_WORK_DIR": str(tmp_path / "work")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "measures nothing on GPUs" in done.stdout
    out = tmp_path / "out"
    assert sorted(path.name for path in out.iterdir()) == [
        f"on_gpu_cpu.{kind}" for kind in ("csv", "json", "md")
    ]
    (ours,) = json.loads((out / "on_gpu_cpu.json").read_text())["cases"]
    assert ours["run"]["ended"] == "ran", ours
    assert ours["run"]["steps"] == 6
    assert [trial["ended"] for trial in ours["trials"]].count("out of memory") >= 1
    limits = {trial["limit_bytes"]: trial["ended"] for trial in ours["trials"]}
    assert min(limit for limit, ended in limits.items() if ended == "ran") == ours["needed_bytes"]
    comparison = scoring.compare(out / "on_gpu_cpu.csv")
    assert {item.row.kind for item in comparison.memory} == {"process", "needed"}
    assert all(abs(item.error) < 0.5 for item in comparison.memory), [
        item.error for item in comparison.memory
    ]
    text = (out / "on_gpu_cpu.md").read_text()
    assert "tiny-llama qlora deepspeed, varying, as drawn, expandable segments off | " in text
    assert "| correctness | PASS |" in text
    assert not list((tmp_path / "work").glob("*/on_gpu-*")), "weights and logs are removed"
