"""Options of the CUDA allocator of PyTorch in the environment of ranks."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from launchers.gang.allocator import GENERAL_NAME, NAME, allocator_environment
from launchers.gang.job import TrainJob
from tests.launchers.gang.conftest import make_job

ON = "expandable_segments:True"


def job(folder: Path, *, device: str = "cuda", gpu: str | None = "H100 SXM", on: bool = True) -> TrainJob:
    made_job = make_job(folder)
    plan = dataclasses.replace(
        made_job.plan,
        layout=dataclasses.replace(made_job.plan.layout, device=device),  # type: ignore[arg-type]
        request=dataclasses.replace(made_job.plan.request, gpu_type=gpu),
    )
    settings = made_job.settings.model_copy(update={"expandable_segments": on})
    return dataclasses.replace(made_job, plan=plan, settings=settings)


@pytest.mark.parametrize("gpu", ["H100 SXM", "A10G", None, "a GPU that no table has"])
def test_expandable_segments_are_enabled_on_nvidia_gpus(tmp_path: Path, gpu: str | None) -> None:
    assert allocator_environment(job(tmp_path, gpu=gpu), {}) == {NAME: ON}


@pytest.mark.parametrize("values", [{"device": "cpu"}, {"gpu": "MI300X"}, {"on": False}])
def test_allocator_options_are_not_set_without_nvidia_gpus_or_if_switched_off(
    tmp_path: Path, values: dict[str, Any]
) -> None:
    assert allocator_environment(job(tmp_path, **values), {NAME: "backend:native"}) == {}


@pytest.mark.parametrize(
    ("user", "expected"),
    [
        ({NAME: "a:1"}, {NAME: f"a:1,{ON}"}),
        ({GENERAL_NAME: "a:1"}, {GENERAL_NAME: f"a:1,{ON}", NAME: f"a:1,{ON}"}),
        ({GENERAL_NAME: "a:1", NAME: "a:2"}, {GENERAL_NAME: f"a:1,{ON}", NAME: f"a:2,{ON}"}),
        ({NAME: " "}, {NAME: ON}),
    ],
)
def test_other_allocator_options_of_the_user_are_kept(
    tmp_path: Path, user: dict[str, str], expected: dict[str, str]
) -> None:
    assert allocator_environment(job(tmp_path), user) == expected


@pytest.mark.parametrize("name", [NAME, GENERAL_NAME])
@pytest.mark.parametrize("value", ["expandable_segments:False", ON, "backend:cudaMallocAsync"])
def test_the_users_choice_of_segments_or_allocator_is_kept(tmp_path: Path, name: str, value: str) -> None:
    assert allocator_environment(job(tmp_path), {name: value}) == {}
