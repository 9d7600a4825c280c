"""Parameters of the fine-tuning flows: the settings file, and options for frequently changed settings."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from metaflow import Config, FlowSpec, Parameter, config_expr

from decorators._metaflow import user_errors
from estimator.cli.common import COMMON
from flows.commands.flow_commands import config_file
from flows.commands.run_help import CHECKS
from flows.finetune import flags
from launchers.settings import choices_of, help_of, overlay, parse_file, parse_yaml


def setting_parameter(name: str, kind: type = str) -> Any:
    """Return a flow parameter for a setting, with its help; the default is the settings file's value."""
    setting = flags.FLAGS[name]
    choices = f" One of {', '.join(choices_of(setting))}." if choices_of(setting) else ""
    return Parameter(
        name.replace("_", "-"),
        type=kind,
        default=config_expr(f"settings.{setting}"),
        help=help_of(setting) + choices,
    )


def text_parameter(name: str) -> Any:
    """Return a flow parameter for a setting that is not plain text; empty means the settings file's value."""
    setting = flags.FLAGS[name]
    return Parameter(name.replace("_", "-"), type=str, default="", help=help_of(setting))


def switch(name: str) -> Any:
    """Return a switch for a setting; if not given, the settings file's value applies."""
    help_text = help_of(flags.FLAGS[name])
    return Parameter(name.replace("_", "-"), is_flag=True, default=False, help=help_text)


def check_switch(name: str) -> Any:
    """Return a flow parameter that is not a setting."""
    return Parameter(name, is_flag=True, default=False, help=CHECKS[name])


def read_settings(text: str) -> dict[str, Any]:
    """Parse the settings file; show a mistake in it as Metaflow shows errors.

    Defaults are filled in only for settings that are flow parameters, whose own defaults refer to them.
    """
    with user_errors():
        file = config_file(sys.argv[1:], "settings")
        values = parse_yaml(text) if file == Path() else parse_file(text, file)
    return overlay(flags.defaults_of_flags(), values)


class FinetuneParameters(FlowSpec):
    """The settings file and the options of a fine-tuning flow."""

    settings = Config(
        "settings",
        default_value="",
        parser=read_settings,
        help="A YAML file of settings (schema: launchers/settings/settings.schema.json).",
    )

    # Model, data and task
    model = setting_parameter("model")
    task = setting_parameter("task")
    dataset = setting_parameter("dataset")
    seq_len = setting_parameter("seq_len", int)
    resolution = setting_parameter("resolution", int)
    packing = text_parameter("packing")
    tokens = text_parameter("tokens")

    # Method and engine
    method = setting_parameter("method")
    engine = setting_parameter("engine")
    precision = setting_parameter("precision")
    activation_checkpointing = text_parameter("activation_checkpointing")

    # Training
    epochs = setting_parameter("epochs", int)
    max_steps = setting_parameter("max_steps", int)
    global_batch_size = setting_parameter("global_batch_size", int)
    micro_batch_size = setting_parameter("micro_batch_size", int)
    lr = text_parameter("lr")
    seed = setting_parameter("seed", int)
    trial = setting_parameter("trial", int)
    checkpoint_every = setting_parameter("checkpoint_every", int)
    eval_every = setting_parameter("eval_every", int)

    # Where it runs
    nodes = setting_parameter("nodes", int)
    gpus = setting_parameter("gpus", int)
    gpu = setting_parameter("gpu")
    instance_type = setting_parameter("instance_type")
    cloud = setting_parameter("cloud")
    from_catalogue = switch("from_catalogue")
    capacity = setting_parameter("capacity")
    spot = switch("spot")
    device = setting_parameter("device")
    queue = setting_parameter("queue")
    zone = setting_parameter("zone")
    pending_timeout = setting_parameter("pending_timeout", float)
    max_disruptions = setting_parameter("max_disruptions", int)
    fabric = setting_parameter("fabric")

    # Output and reports
    output_dir = setting_parameter("output_dir")
    adapter_only = switch("adapter_only")
    push = setting_parameter("push")
    eval_harness = text_parameter("eval_harness")
    tracker = text_parameter("tracker")
    profile_steps = text_parameter("profile_steps")

    # Planning and checks
    overrides = Parameter("set", default="", multiple=True, help=CHECKS["set"])
    no_calibration = check_switch("no-calibration")
    no_preflight = check_switch("no-preflight")
    ignore_checklist = check_switch("ignore-checklist")
    plan_only = Parameter("plan-only", is_flag=True, default=False, help=COMMON["plan_only"].text)
    verbose = Parameter("verbose", is_flag=True, default=False, help=COMMON["verbose"].text)
