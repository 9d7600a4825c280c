"""Conversion of axolotl, LLaMA-Factory, TRL and torchtune configurations to settings of this package.

conversion_rules.py has the supported keys. A key without a rule is reported, never dropped.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from estimator.errors import UserError
from estimator.formatting import format_count
from estimator.models.architectures import MLP_PROJECTIONS
from estimator.untrusted import MAX_YAML_BYTES, parse_yaml, read_text
from launchers import settings
from launchers.settings.conversion_rules import REASONS, RULES, Rule, Tool, UntranslatableError

Values = dict[str, Any]  # settings by dotted name


@dataclass(frozen=True, kw_only=True, slots=True)
class Translated:
    """One key of the file, and the setting and value that replace it."""

    key: str
    value: Any
    setting: str
    result: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversion:
    """Converted settings, and the outcome for each key of the file."""

    tool: Tool
    values: Values
    translated: tuple[Translated, ...]
    unneeded: tuple[tuple[str, str], ...]  # (key, why no setting is needed)
    missing: tuple[tuple[str, str], ...]  # (key and value, why there is no counterpart)

    def nested(self) -> dict[str, Any]:
        """Return the settings as nested mappings, the form of a settings file."""
        nested: dict[str, Any] = {}
        for name, value in self.values.items():
            *sections, last = name.split(".")
            section_values = nested
            for section in sections:
                section_values = section_values.setdefault(section, {})
            section_values[last] = value
        return nested


_DISTINCTIVE_KEYS: dict[Tool, tuple[str, ...]] = {  # keys that identify a tool
    "torchtune": ("checkpointer", "tokenizer", "optimizer"),
    "LLaMA-Factory": ("finetuning_type", "stage", "cutoff_len", "template"),
    "axolotl": ("base_model", "sequence_len", "micro_batch_size", "num_epochs"),
    "TRL": ("model_name_or_path", "per_device_train_batch_size", "learning_rate"),
}


def recognize(config: Mapping[str, Any]) -> Tool:
    """Identify the tool that a configuration belongs to; raises UserError if it is none of the four."""
    for tool, keys in _DISTINCTIVE_KEYS.items():
        required = len(keys) if tool == "torchtune" else 1
        # Files for inference or export have no learning rate
        trains = tool == "torchtune" or "learning_rate" in config
        if trains and sum(key in config for key in keys) >= required:
            return tool
    raise UserError(
        "This is not a training configuration of axolotl, LLaMA-Factory, TRL or torchtune.",
        "Use a YAML file that one of them trains with.",
    )


def read(path: Path) -> dict[str, Any]:
    """Read a YAML mapping; raises UserError if the file is unreadable or contains something else."""
    try:
        config = parse_yaml(read_text(path.expanduser(), MAX_YAML_BYTES))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.", "Check the path.") from None
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{path} cannot be read: {reason}.", "Use a YAML file.") from None
    if not isinstance(config, dict):
        raise UserError(f"{path} has no keys.", "Use a YAML file that one of the tools trains with.")
    return config


def convert(config: Mapping[str, Any], *, gpus: int = 1, task: str | None = None) -> Conversion:
    """Translate the configuration of another tool.

    Parameters
    ----------
    gpus:
        Number of processes of the other tool's run; its global batch size is multiplied by it.
    task:
        Training task; needed for TRL, whose files do not name it.
    """
    tool = recognize(config)
    rules = RULES[tool]
    values: Values = {} if task is None else {"task": task}
    translated: list[Translated] = []
    unneeded: list[tuple[str, str]] = []
    missing: list[tuple[str, str]] = []
    for key, value in _flattened(config, rules):
        rule = rules.get(key)
        if _is_off(value) and (rule is None or rule.false_is_default or not isinstance(value, bool)):
            continue
        if rule is None:
            missing.append((f"{key}: {value}", REASONS.get(key, "no counterpart")))
        elif not rule.setting:
            unneeded.append((key, rule.note))
        else:
            try:
                result = rule.translate(value)
                settings.build({}, flags={**values, rule.setting: result})
            except (UntranslatableError, UserError) as error:
                reason = error.problem if isinstance(error, UserError) else str(error)
                missing.append((f"{key}: {value}", reason))
                continue
            values[rule.setting] = result
            translated.append(Translated(key=key, value=value, setting=rule.setting, result=result))
    for setting, (key, result) in _derived(tool, config, values, gpus).items():
        values[setting] = result
        translated.append(Translated(key=key, value="", setting=setting, result=result))
        missing = [item for item in missing if item[0].partition(":")[0] not in key.split(", ")]
    settings.build({}, flags=values)
    return Conversion(
        tool=tool,
        values=values,
        translated=tuple(translated),
        unneeded=tuple(unneeded),
        missing=tuple(missing),
    )


def _derived(tool: Tool, config: Mapping[str, Any], values: Values, gpus: int) -> dict[str, tuple[str, Any]]:
    """Derive settings that depend on several keys; return setting -> (names of the keys, value)."""
    derived: dict[str, tuple[str, Any]] = {}
    micro = values.get("micro_batch_size")
    if micro is not None and "global_batch_size" not in values:
        steps = config.get("gradient_accumulation_steps") or 1
        if isinstance(steps, int):
            derived["global_batch_size"] = (
                f"gradient_accumulation_steps, {format_count(gpus, 'process')}",
                micro * steps * gpus,
            )
    if tool == "torchtune":
        component = str((config.get("model") or {}).get("_component_", "")).rpartition(".")[2]
        kind = next((kind for kind in ("qlora", "lora") if component.startswith(kind)), "full")
        use_dora = (config.get("model") or {}).get("use_dora") is True
        derived["method"] = (
            "model._component_, model.use_dora",
            "dora" if use_dora and kind == "lora" else kind,
        )
        model = config.get("model") or {}
        if model.get("apply_lora_to_mlp") is True and isinstance(values.get("lora.targets"), list):
            targets = [*values["lora.targets"], *MLP_PROJECTIONS]
            derived["lora.targets"] = ("model.apply_lora_to_mlp", targets)
        if "DPOLoss" in str((config.get("loss") or {}).get("_component_")):
            derived["task"] = ("loss._component_", "dpo")
        return derived
    if config.get("pref_loss") in ("sigmoid", "orpo", "simpo") and values.get("task") == "dpo":
        loss = str(config["pref_loss"])
        derived["task"] = ("pref_loss", "dpo" if loss == "sigmoid" else loss)
    if config.get("load_in_8bit") is True and values.get("method") == "lora":
        derived["method"] = ("load_in_8bit", "qlora")
        derived["lora.quantization"] = ("load_in_8bit", "int8")
    if tool == "LLaMA-Factory" and "method" not in values and not config.get("finetuning_type"):
        # The classic layout trains LoRA by default, the newer one (peft_config) all weights
        derived["method"] = ("finetuning_type", "full" if "train_dataset" in config else "lora")
    is_4bit = config.get("load_in_4bit") is True or config.get("quantization_bit") == 4
    if tool == "TRL":
        low_rank = config.get("use_peft") is True
        derived["method"] = (
            "use_peft, load_in_4bit",
            "qlora" if low_rank and is_4bit else "lora" if low_rank else "full",
        )
    elif values.get("method") == "lora" and is_4bit:
        derived["method"] = ("load_in_4bit, quantization_bit", "qlora")
    elif tool == "axolotl" and not config.get("adapter"):
        derived["method"] = ("adapter", "full")
    elif is_4bit and values.get("method") == "qlora":
        derived["method"] = ("load_in_4bit, quantization_bit", "qlora")
    return derived


def _flattened(config: Mapping[str, Any], rules: Mapping[str, Rule]) -> Iterator[tuple[str, Any]]:
    """Iterate over keys and values; sections that occur in ``rules`` are flattened to dotted keys."""
    sections = {key.partition(".")[0] for key in rules if "." in key}
    for key, value in config.items():
        if isinstance(value, dict) and key in sections:
            yield from ((f"{key}.{name}", item) for name, item in value.items())
        else:
            yield str(key), value


def _is_off(value: Any) -> bool:
    """Whether a value is empty, or turns a feature off."""
    return (
        value is None
        or value is False
        or value in ("", [], {})
        or (isinstance(value, float) and math.isnan(value))
    )
