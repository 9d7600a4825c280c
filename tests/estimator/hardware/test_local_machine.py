"""What this machine has."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from estimator.hardware import local_machine


def test_this_machine_has_cores_memory_and_disk(tmp_path: Path) -> None:
    machine = local_machine.detect(tmp_path / "not" / "made" / "yet")
    assert machine.cpu_cores >= 1
    assert machine.ram_bytes > 2**28
    assert machine.disk_free_bytes > 0


def fake_nvml(names: list[str]) -> Any:
    class NVMLError(Exception):
        pass

    return SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: len(names),
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetName=names.__getitem__,
        nvmlDeviceGetUUID=lambda index: f"GPU-{index}a",
        nvmlDeviceGetMemoryInfo=lambda _: SimpleNamespace(total=24 * 2**30),
    )


@pytest.mark.parametrize(
    ("visible", "names"), [(None, ["NVIDIA L4", "Tesla T4"]), ("1,0", ["Tesla T4", "NVIDIA L4"])]
)
def test_local_gpus_follow_cuda_visible_devices(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, names: list[str]
) -> None:
    monkeypatch.setattr(local_machine, "_has_driver_library", lambda: True)
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(["NVIDIA L4", "Tesla T4"]))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [name for name, _ in local_machine.detect().gpus] == names
