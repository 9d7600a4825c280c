"""DeepSpeed JSON files as settings: converted keys and refused ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from estimator.errors import UserError
from launchers import settings


def written(folder: Path, values: object) -> str:
    path = folder / "deepspeed.json"
    path.write_text(json.dumps(values))
    return str(path)


FILE: dict[str, Any] = {  # as transformers' documentation has it, with a few figures
    "fp16": {"enabled": "auto", "loss_scale": 0},
    "bf16": {"enabled": "auto"},
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": 0.5,
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "reduce_bucket_size": "auto",
        "stage3_max_live_parameters": 1000000,
    },
}


def test_a_deepspeed_file_becomes_settings_of_the_plan_and_options_of_the_engine(tmp_path: Path) -> None:
    built = settings.build({"zero": {"config": written(tmp_path, FILE)}})
    assert (built.engine, built.global_batch_size, built.micro_batch_size) == ("deepspeed", 8, 2)
    assert (built.clip_grad_norm, built.zero.stage, built.zero.offload) == (0.5, 3, "cpu")
    assert built.zero.config is None
    assert built.engine_options["zero_optimization"] == {
        "offload_optimizer": {"pin_memory": True},
        "stage3_max_live_parameters": 1000000,
    }


def test_settings_take_precedence_over_the_deepspeed_file(tmp_path: Path) -> None:
    path = written(tmp_path, FILE)
    beside = settings.build({"zero": {"config": path, "stage": 2}})
    assert (beside.zero.stage, beside.zero.offload) == (2, "cpu")
    defaults = settings.Settings().model_dump(mode="json")
    named_last = settings.build(defaults, [f"zero.config={path}", "zero.stage=1"])
    assert (named_last.zero.stage, named_last.global_batch_size) == (1, 8)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"fp16": {"enabled": True}}, "fp16"),
        ({"gradient_accumulation_steps": 4}, "gradient_accumulation_steps"),
        ({"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}, "nvme"),
        ({"zero_optimization": {"offload_param": {"device": "cpu"}}}, "offload_param"),
        ({"zero_optimization": {"stage": 7}}, "zero.stage = 7"),
        ([1], "JSON object"),
    ],
)
def test_unsupported_deepspeed_options_are_named(tmp_path: Path, values: object, named: str) -> None:
    with pytest.raises(UserError, match=named):
        settings.build({"zero": {"config": written(tmp_path, values)}})


def test_a_missing_or_invalid_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no\.json"):
        settings.build({}, [f"zero.config={tmp_path / 'no.json'}"])
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    with pytest.raises(UserError, match="is not JSON"):
        settings.build({}, [f"zero.config={broken}"])
