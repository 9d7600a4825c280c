"""What is said of GPUs, torch and NCCL, on this machine."""

from __future__ import annotations

from checklist.checks.gpu import gpus_probe
from tests.flows.doctor.conftest import Asker


def test_gpus_are_listed_or_their_absence_with_a_fix(ask: Asker) -> None:
    seen = gpus_probe.list_gpus()
    line = ask("GPU")["GPU"]
    if seen.names:
        assert line.found.startswith(f"{seen.names.count(seen.names[0])} x {seen.names[0]}")
    else:
        assert line.state == "no"
        assert "no NVIDIA GPU" in line.found
        assert "nvidia-smi" in line.fix


def test_torchs_build_is_shown_and_untried_nccl_is_not_called_working(ask: Asker) -> None:
    import torch

    lines = ask("torch")
    assert lines["torch build"].found.startswith(torch.__version__)
    assert lines["NCCL"].state == ("ok" if torch.cuda.is_available() else "unknown")
