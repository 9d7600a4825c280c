"""A DeepSpeed JSON file of the user's own, as settings of a run.

What a plan has to know (batches, ZeRO's stage, offload, precision, clipping) becomes the setting that it is
here; the rest goes into ``engine_options`` as it stands. Values ``"auto"``, as in transformers' examples, are
left to the plan.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from estimator.errors import Change, UserError

_DIRECT = {
    "train_batch_size": "global_batch_size",
    "train_micro_batch_size_per_gpu": "micro_batch_size",
    "gradient_clipping": "clip_grad_norm",
}


def settings_of(path: str) -> dict[str, Any]:
    """The file as nested settings; raises UserError for what can't be read or isn't run here."""
    values = _without_auto(_read(Path(path).expanduser()))
    if values.get("fp16", {}).pop("enabled", False):
        raise UserError(f"{path}: fp16 is on, and runs here are in bf16 or fp32.", "Leave the section out.")
    if "gradient_accumulation_steps" in values:
        raise UserError(
            f"{path}: gradient_accumulation_steps follows from the batch, the micro batch and the GPUs.",
            ("Leave it out, and give ", Change("global_batch_size"), "."),
        )
    settings: dict[str, Any] = {"engine": "deepspeed"}
    for name, setting in _DIRECT.items():
        if name in values:
            settings[setting] = values.pop(name) or None
    bf16 = values.get("bf16", {}).pop("enabled", None)
    if bf16 is False:
        settings["precision"] = "fp32"
    zero = values.get("zero_optimization", {})
    stage = zero.pop("stage", None)
    if stage is not None:
        settings["zero"] = {"stage": stage}
    offload = zero.get("offload_optimizer", {}).pop("device", None)
    if offload not in (None, "none", "cpu"):
        raise UserError(f"{path}: offload_optimizer to {offload} is not run here.", "Choose cpu, or none.")
    if offload == "cpu":
        settings.setdefault("zero", {})["offload"] = "cpu"
    if zero.get("offload_param", {}).pop("device", "none") != "none":
        raise UserError(f"{path}: offload_param is not run here.", "Leave it out, or use engine fsdp2.")
    rest = {name: value for name, value in values.items() if value != {}}
    if rest.get("zero_optimization"):
        rest["zero_optimization"] = {name: value for name, value in zero.items() if value != {}}
    rest = {name: value for name, value in rest.items() if value != {}}
    return settings | ({"engine_options": rest} if rest else {})


def _read(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(
            f"{path} can't be read: {error.strerror}.",
            (
                "A run on a cluster has the file only if the settings file names it: ",
                Change("zero.config"),
                " is read where that is.",
            ),
        ) from None
    except ValueError as error:
        raise UserError(f"{path} is not JSON: {error}.") from None
    if not isinstance(values, dict):
        raise UserError(f"{path} holds no DeepSpeed configuration: it must be a JSON object.")
    return values


def _without_auto(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _without_auto(value) if isinstance(value, dict) else value
        for name, value in values.items()
        if value != "auto"
    }
