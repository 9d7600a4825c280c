"""Training of Stable Diffusion XL: size of the model, and a rehearsal with tiny-sdxl."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.on_gpu import images
from estimator.models.diffusion import STABLE_DIFFUSION_XL


def test_the_unet_has_the_size_of_stable_diffusion_xl() -> None:
    torch = pytest.importorskip("torch")
    diffusers = pytest.importorskip("diffusers")
    with torch.device("meta"):
        unet = diffusers.UNet2DConditionModel(**images.UNET)
    assert sum(each.numel() for each in unet.parameters()) == STABLE_DIFFUSION_XL.parameters


def test_a_dry_run_prints_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["images", "--dry-run", "--steps", "7"])
    images.main()
    text = capsys.readouterr().out
    assert "-m launchers" in text
    assert "max_steps=7" in text


@pytest.mark.slow
@pytest.mark.nightly
def test_a_rehearsal_compares_memory_with_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("diffusers")
    monkeypatch.setenv("FINETUNE_WORK_DIR", str(tmp_path / "work"))
    monkeypatch.setattr(sys, "argv", ["images", "--tiny", "--steps", "3", "--out", str(tmp_path)])
    images.main()
    figures = json.loads((tmp_path / "sdxl_cpu.json").read_text())
    assert figures["measured"]["memory_peak_bytes"] > 0
    assert figures["predicted"]["memory_bytes"] > 0
    assert len(figures["losses"]) == 3
