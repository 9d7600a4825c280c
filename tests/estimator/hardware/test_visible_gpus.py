"""CUDA_VISIBLE_DEVICES is read as CUDA does."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from estimator.hardware.visible_gpus import VARIABLE, visible_gpus, visible_handles

UUIDS = ("GPU-aa11", "GPU-ab22", "GPU-cc33")


@pytest.mark.parametrize(
    ("chosen", "visible"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("2,0", [2, 0]),
        (" 1 , GPU-cc33", [1, 2]),
        ("GPU-ab", [1]),
        ("GPU-a", []),  # of two
        ("0,GPU-a,2", [0]),
        ("0,7,1", [0]),
        ("1,-1,2", [1]),
        ("MIG-77", ["MIG-77"]),
        ("0,MIG-77,1", [0, "MIG-77", 1]),
    ],
)
def test_the_first_unknown_entry_ends_the_list_of_visible_gpus(
    chosen: str | None, visible: list[int | str]
) -> None:
    assert visible_gpus(chosen, UUIDS) == visible


def test_handles_end_at_the_first_mig_slice_unless_slices_are_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nvml = SimpleNamespace(
        nvmlDeviceGetCount=lambda: len(UUIDS),
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetUUID=UUIDS.__getitem__,
        nvmlDeviceGetHandleByUUID=lambda name: f"handle of {name}",
    )
    monkeypatch.setenv(VARIABLE, "0,MIG-77,1")
    assert visible_handles(nvml) == [0]
    assert visible_handles(nvml, slices=True) == [0, "handle of MIG-77", 1]
    monkeypatch.delenv(VARIABLE)
    assert visible_handles(nvml) == [0, 1, 2]
