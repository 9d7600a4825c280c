"""What the ranks' environment says to PyTorch's CUDA allocator."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launchers.gang.allocator import allocator_environment
from launchers.gang.job import TrainJob
from tests.launchers.gang.conftest import Gang, make_job

ON = "expandable_segments:True"


def job(folder: Path, *, device: str = "cuda", gpu: str | None = "H100 SXM", on: bool = True) -> TrainJob:
    made = make_job(folder)
    plan = dataclasses.replace(
        made.plan,
        layout=dataclasses.replace(made.plan.layout, device=device),  # type: ignore[arg-type]
        request=dataclasses.replace(made.plan.request, gpu_type=gpu),
    )
    settings = made.settings.model_copy(update={"expandable_segments": on})
    return dataclasses.replace(made, plan=plan, settings=settings)


@pytest.mark.parametrize("gpu", ["H100 SXM", "A10G", None, "a GPU that no table has"])
def test_on_nvidia_gpus_segments_expand(tmp_path: Path, gpu: str | None) -> None:
    assert allocator_environment(job(tmp_path, gpu=gpu), {}) == {"PYTORCH_CUDA_ALLOC_CONF": ON}


@pytest.mark.parametrize("values", [{"device": "cpu"}, {"gpu": "MI300X"}, {"on": False}])
def test_nothing_is_set_where_there_are_none_or_they_are_switched_off(
    tmp_path: Path, values: dict[str, Any]
) -> None:
    assert allocator_environment(job(tmp_path, **values), {"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}) == {}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (
            {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128"},
            {"PYTORCH_CUDA_ALLOC_CONF": f"max_split_size_mb:128,{ON}"},
        ),
        (
            {"PYTORCH_ALLOC_CONF": "max_split_size_mb:128"},
            {
                "PYTORCH_ALLOC_CONF": f"max_split_size_mb:128,{ON}",
                "PYTORCH_CUDA_ALLOC_CONF": f"max_split_size_mb:128,{ON}",
            },
        ),
        (
            {"PYTORCH_ALLOC_CONF": "max_split_size_mb:1", "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:2"},
            {
                "PYTORCH_ALLOC_CONF": f"max_split_size_mb:1,{ON}",
                "PYTORCH_CUDA_ALLOC_CONF": f"max_split_size_mb:2,{ON}",
            },
        ),
        ({"PYTORCH_CUDA_ALLOC_CONF": " "}, {"PYTORCH_CUDA_ALLOC_CONF": ON}),
    ],
)
def test_what_the_user_has_set_of_other_options_is_kept(
    tmp_path: Path, given: dict[str, str], expected: dict[str, str]
) -> None:
    assert allocator_environment(job(tmp_path), given) == expected


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
@pytest.mark.parametrize("value", ["expandable_segments:False", ON, "backend:cudaMallocAsync"])
def test_what_the_user_says_of_segments_or_of_another_allocator_stands(
    tmp_path: Path, name: str, value: str
) -> None:
    assert allocator_environment(job(tmp_path), {name: value}) == {}


@pytest.mark.parametrize(("device", "expected"), [("cuda", f"max_split_size_mb:64,{ON}"), ("cpu", None)])
def test_a_real_rank_finds_it_in_its_environment(
    gang: Callable[..., Gang], monkeypatch: pytest.MonkeyPatch, device: str, expected: str | None
) -> None:
    if expected is not None:
        monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    one = gang(device=device, orders={"steps": 1, "at": 1, "do": "tell_environment"}).start_all()
    assert "error" not in one.end(0), one.logs()
    told = json.loads((one.folder / "node-0/output/environment.json").read_text())
    assert told.get("PYTORCH_CUDA_ALLOC_CONF") == expected
