"""Conversion of a DeepSpeed JSON file to the settings of a run.

Options that the plan needs (batches, ZeRO stage, offload, precision, clipping) become the corresponding
settings; all other options are copied to ``engine_options``. Options with the value ``"auto"``, as in
transformers' examples, are omitted, so the plan chooses them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from estimator.errors import UserError
from estimator.untrusted import parse_json, read_text

_DIRECT = {
    "train_batch_size": "global_batch_size",
    "train_micro_batch_size_per_gpu": "micro_batch_size",
    "gradient_clipping": "clip_grad_norm",
}


def settings_of(path: str) -> dict[str, Any]:
    """Convert a DeepSpeed file to nested settings; raises UserError if unreadable or unsupported."""
    values = _without_auto(_read(Path(path).expanduser()))
    if _section(path, values, "fp16").pop("enabled", False):
        raise UserError(
            f"{path}: fp16 is enabled; engine deepspeed supports only bf16 and fp32.",
            "Remove the section, or train with engine fsdp2, which supports fp16-mixed.",
        )
    if "gradient_accumulation_steps" in values:
        raise UserError(
            f"{path}: gradient_accumulation_steps follows from the batch, the micro batch and the GPUs.",
            "Remove it, and set --global-batch-size.",
        )
    settings: dict[str, Any] = {"engine": "deepspeed"}
    for name, setting in _DIRECT.items():
        if name in values:
            settings[setting] = values.pop(name) or None
    bf16 = _section(path, values, "bf16").pop("enabled", None)
    if bf16 is False:
        settings["precision"] = "fp32"
    zero = _section(path, values, "zero_optimization")
    stage = zero.pop("stage", None)
    if stage is not None:
        settings["zero"] = {"stage": stage}
    offload = _section(path, zero, "offload_optimizer").pop("device", None)
    if offload not in (None, "none", "cpu"):
        raise UserError(f"{path}: offload_optimizer to {offload} is not supported.", "Use cpu or none.")
    if offload == "cpu":
        settings.setdefault("zero", {})["offload"] = "cpu"
    if _section(path, zero, "offload_param").pop("device", "none") != "none":
        raise UserError(f"{path}: offload_param is not supported.", "Remove it, or use engine fsdp2.")
    remaining = {name: value for name, value in values.items() if value != {}}
    if remaining.get("zero_optimization"):
        remaining["zero_optimization"] = {name: value for name, value in zero.items() if value != {}}
    remaining = {name: value for name, value in remaining.items() if value != {}}
    return settings | ({"engine_options": remaining} if remaining else {})


def _section(path: str, values: Mapping[str, Any], name: str) -> dict[str, Any]:
    section = values.get(name, {})
    if not isinstance(section, dict):
        raise UserError(f"{path}: {name} is {section!r:.100}, and must be an object.")
    return section


def _read(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file; raises UserError."""
    try:
        values = parse_json(read_text(path))
    except OSError as error:
        raise UserError(
            f"Cannot read {path}: {error.strerror}.",
            (
                "For a run on a cluster, set --zero-config in the settings file, which is read where the run "
                "is launched."
            ),
        ) from None
    except ValueError as error:
        raise UserError(f"{path} is not JSON: {error}.") from None
    if not isinstance(values, dict):
        raise UserError(f"{path} is not a DeepSpeed configuration: it must be a JSON object.")
    return values


def _without_auto(values: Mapping[str, Any]) -> dict[str, Any]:
    """Remove values of "auto" at any depth."""
    return {
        name: _without_auto(value) if isinstance(value, dict) else value
        for name, value in values.items()
        if value != "auto"
    }
