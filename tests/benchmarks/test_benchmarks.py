"""Commands of the benchmarks, without measurements."""

from __future__ import annotations

import ast
import runpy
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from benchmarks import main_job
from benchmarks.gpu_speed import cases, predicted
from benchmarks.gpu_speed.suites import H100, SUITES, suite_of
from estimator import models
from launchers import run_config
from launchers.run.job import build_job

ROOT = Path(__file__).parents[2]
OF_TORCHTUNE = "gpu_speed/tune.py"  # its help is torchtune's


def commands() -> list[str]:
    """Return the files of benchmarks that are commands."""
    folder = ROOT / "benchmarks"
    names = []
    for file in sorted(folder.rglob("*.py")):
        conditions = [node.test for node in ast.parse(file.read_text()).body if isinstance(node, ast.If)]
        if any("__main__" in ast.unparse(condition) for condition in conditions):
            names.append(str(file.relative_to(folder)))
    names.remove(OF_TORCHTUNE)
    return names


@pytest.mark.parametrize("name", commands())
def test_a_benchmark_prints_its_help_and_measures_nothing(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(ROOT / "benchmarks" / name), run_name="__main__")
    assert stopped.value.code == 0
    assert "usage:" in capsys.readouterr().out.lower()


def test_the_main_job_resolves_to_torchtune_with_all_weights() -> None:
    config = main_job._config(20)
    job = build_job(config, models.find("tiny-llama"), 20)
    assert (job.method, job.engine, job.seq_len) == ("full", "torchtune", 256)


@pytest.mark.parametrize("name", SUITES)
def test_settings_of_each_run_of_a_suite_resolve(name: str) -> None:
    suite = suite_of(name, is_tiny=False, target=H100)
    runs = [run for run in suite.runs if not run.is_peer and not predicted.refusal(run, suite.scale, H100)]
    assert runs
    for run in runs:
        settings = cases.settings_of(run, suite.scale, Path("model"), Path("rows"))
        spec = models.find(run.case.model)
        config = run_config.resolve(settings, spec, method=settings.method, engine=settings.engine)
        assert build_job(config, spec, suite.scale.steps).engine == run.engine.split()[0]
