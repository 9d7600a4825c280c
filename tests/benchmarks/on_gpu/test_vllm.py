"""Sampling and serving: requirements, and a rehearsal with transformers on the CPU."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from benchmarks.on_gpu import vllm
from estimator.hardware.local_machine import detect


def run_main(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["vllm", *arguments])
    vllm.main()


def test_a_dry_run_lists_models_and_servers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_main(monkeypatch, "--dry-run")
    assert "server: vllm" in capsys.readouterr().out


@pytest.mark.skipif(bool(detect().gpus), reason="of machines without a GPU")
def test_a_machine_without_a_gpu_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(SystemExit) as ended:
        run_main(monkeypatch, "--out", str(tmp_path))
    assert ended.value.code == 2
    assert "Use --tiny or --dry-run." in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.skipif(importlib.util.find_spec("uvicorn") is None, reason="transformers serve needs uvicorn")
def test_a_rehearsal_samples_and_serves_with_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FINETUNE_WORK_DIR", str(tmp_path / "work"))
    with pytest.raises(SystemExit) as ended:
        run_main(monkeypatch, "--tiny", "--out", str(tmp_path))
    figures = json.loads((tmp_path / "vllm_cpu.json").read_text())
    assert not ended.value.code, figures
    served = figures["serve, transformers"]
    assert served["tokens"] == vllm.TINY.requests * vllm.TINY.new_tokens
