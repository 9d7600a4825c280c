"""Flags of the fine-tuning flows: the setting of each, and the settings that a command line chooses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from launchers import settings
from launchers.settings import Settings

# Setting of each flag of the flow. Other settings are set by the YAML file and --set.
FLAGS = {
    "model": "model",
    "task": "task",
    "method": "method",
    "engine": "engine",
    "dataset": "dataset",
    "seq_len": "seq_len",
    "resolution": "images.resolution",
    "packing": "packing",
    "epochs": "epochs",
    "max_steps": "max_steps",
    "tokens": "tokens",
    "global_batch_size": "global_batch_size",
    "micro_batch_size": "micro_batch_size",
    "lr": "optimizer.lr",
    "precision": "precision",
    "activation_checkpointing": "activation_checkpointing",
    "seed": "seed",
    "trial": "trial",
    "checkpoint_every": "checkpoint_every",
    "eval_every": "evaluation.every_steps",
    "profile_steps": "profile.steps",
    "tracker": "tracker",
    "output_dir": "output_dir",
    "eval_harness": "harness.tasks",
    "adapter_only": "export.adapter_only",
    "push": "export.push",
    "nodes": "resources.nodes",
    "gpus": "resources.gpus",
    "gpu": "resources.gpu",
    "instance_type": "resources.instance_type",
    "cloud": "resources.cloud",
    "from_catalogue": "resources.from_catalogue",
    "capacity": "resources.capacity",
    "spot": "resources.spot",
    "device": "resources.device",
    "queue": "resources.queue",
    "zone": "resources.zone",
    "pending_timeout": "resources.pending_timeout",
    "max_disruptions": "resources.max_disruptions",
    "fabric": "resources.fabric",
}
# Only flows/rejection_flow.py has these; its attributes for them are score_option and answers_option.
REJECTION_FLAGS = {"score": "rejection.score", "answers": "rejection.answers"}
LISTS = ("tracker", "eval_harness")  # flags with a comma-separated list
# Flags without a value: where one is not given, the file's setting holds
SWITCHES = ("from_catalogue", "spot", "adapter_only")
original_arguments: list[str] = []
"""Arguments of this process before they were translated to flags."""


def defaults_of_flags() -> dict[str, Any]:
    """Return the defaults of the settings that are flow parameters, nested as in a settings file."""
    defaults = Settings().model_dump(mode="json")
    values: dict[str, Any] = {}
    for name in (*FLAGS.values(), *REJECTION_FLAGS.values()):
        section, _, last = name.rpartition(".")
        if section:
            values.setdefault(section, {})[last] = defaults[section][last]
        else:
            values[last] = defaults[last]
    return values


def settings_from(config: Mapping[str, Any], params: Mapping[str, Any]) -> Settings:
    """Return the settings file's values, overridden by flags, and both by ``--set``.

    Raises UserError with one line per invalid value, with the name that the user used.
    """
    flags: dict[str, Any] = {}
    for flag, name in (FLAGS | REJECTION_FLAGS).items():
        value = params.get(flag)
        if value in (None, "") or (flag in SWITCHES and not value):
            continue
        if flag in LISTS and isinstance(value, str):
            value = [part.strip() for part in value.split(",")]
        flags[name] = value
    chosen = settings.build(config, overrides_of(params), flags)
    settings.check_used(chosen, overrides_of(params), model_resolved=False)
    return chosen


def overrides_of(params: Mapping[str, Any]) -> Sequence[str]:
    """Return the values of ``--set``."""
    return params.get("overrides") or params.get("set") or ()


def flags_of(flow: Any) -> dict[str, Any]:
    """Return a running flow's parameters in the form of :func:`settings_from`."""
    flags = {flag: getattr(flow, flag) for flag in FLAGS} | {"overrides": flow.overrides}
    rejection_flags = [flag for flag in REJECTION_FLAGS if hasattr(flow, f"{flag}_option")]
    return flags | {flag: getattr(flow, f"{flag}_option") for flag in rejection_flags}
