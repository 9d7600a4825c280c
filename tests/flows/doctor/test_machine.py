"""GPUs, torch and NCCL of this machine."""

from __future__ import annotations

from checklist.checks.gpu import gpus_probe
from tests.flows.doctor.conftest import QueryProbe


def test_gpus_are_listed_or_their_absence_with_a_fix(query_probe: QueryProbe) -> None:
    gpus = gpus_probe.list_gpus()
    line = query_probe("GPU")["GPU"]
    if gpus.names:
        assert line.found.startswith(f"{gpus.names.count(gpus.names[0])} x {gpus.names[0]}")
    else:
        assert line.state == "no"
        assert "no NVIDIA GPU" in line.found
        assert "nvidia-smi" in line.fix


def test_torchs_build_is_shown_and_untried_nccl_is_not_called_working(query_probe: QueryProbe) -> None:
    import torch

    lines = query_probe("torch")
    assert lines["torch build"].found.startswith(torch.__version__)
    assert lines["NCCL"].state == ("ok" if torch.cuda.is_available() else "unknown")
