"""Help of ``finetune run``, and of ``run`` of the flows: options grouped by purpose."""

from __future__ import annotations

import json

from estimator.cli.common import COMMON
from estimator.cli.help import EXAMPLES, GROUPS, Line, page
from flows.commands.run_options import OF_METAFLOW
from launchers.settings import default_of, help_of, type_of
from launchers.settings.options import setting_options

HELP_OPTIONS = (
    *("model", "dataset", "task", "seq_len"),
    *("method", "engine", "lora_rank", "lora_alpha", "quantization"),
    *("epochs", "max_steps", "lr", "global_batch_size", "micro_batch_size", "optimizer", "precision"),
    *("activation_checkpointing", "packing"),
    *("with", "gpu", "gpus", "nodes", "instance_type", "spot", "device", "queue"),
    *("output_dir", "push", "checkpoint_every", "eval_every", "tracker", "plan_only", "verbose"),
)
"""Options of the help page, in order; ``--help-all`` shows all others, too."""
SUMMARY = "Fine-tune a model."
REJECTION_SUMMARY = "Draw several answers to each prompt, score them, and train on the best."
REJECTION_EXAMPLE = "finetune flow rejection run --score my_scores.py:short_answers --answers 8"
REJECTION = {
    "--score SCORER": "Score function FILE.py:NAME, or a reward model (required)",
    "--answers N": f"Answers sampled for each prompt [default: {default_of('rejection.answers')}]",
}
"""Options of the rejection sampling flow, with their help."""
CHECKS = {
    "set": "Any setting by its dotted name, may be repeated: --set optimizer.lr=2e-5",
    "no-calibration": "Plan without the measurements of finished runs",
    "no-preflight": "Submit without checking whether the cluster can run this",
    "ignore-checklist": "Start even if the cluster's newest checklist failed within the last day",
}
"""Parameters of the flow that are not settings, with their help."""


def help_page(command: str, *, everything: bool = False, rejection: bool = False) -> str:
    """Format the help of ``command``. ``everything``: with all settings and Metaflow's options.

    ``rejection``: of the rejection sampling flow, which has two options more.
    """
    groups: dict[str, list[Line]] = {name: [] for name in GROUPS}
    settings = setting_options()
    if rejection:
        groups = {
            "Rejection sampling": [Line(names=names, text=text) for names, text in REJECTION.items()]
        } | groups
    for name in HELP_OPTIONS:
        option = COMMON[name]
        setting = settings.get(_option(name))
        metavar = f" {option.metavar}" if option.metavar else ""
        default = option.unset if setting is None else _default(setting) or option.unset
        groups[option.group].append(Line(names=_option(name) + metavar, text=option.help, default=default))
    closing = ["--help-all shows every option; `finetune settings WORD` searches settings."]
    if everything:
        _add_settings(groups)
        groups["Checks"] = [Line(names=f"--{name}", text=text) for name, text in CHECKS.items()]
        groups["Metaflow"] = [Line(names=name, text=text) for name, text in OF_METAFLOW.items()]
        closing = ["--help shows the options that most people use, --help-all this page."]
    return page(
        f"{command} [FILE.yaml] [OPTIONS]",
        f"{REJECTION_SUMMARY if rejection else SUMMARY} Options override the settings in FILE.yaml.",
        groups,
        example=REJECTION_EXAMPLE if rejection else EXAMPLES["run"],
        closing=closing,
    )


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _default(setting: str) -> str:
    value = default_of(setting)
    if value is None or value is False or value in ("", (), {}):
        return ""
    if setting in ("activation_checkpointing", "packing", "optimizer.lr", "checkpoint_every") and value in (
        "auto",
        0,
    ):
        return ""  # the help in COMMON describes the default
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _names(option: str, setting: str) -> str:
    """Return an option with the values that it takes: ``--log-every N|auto``, ``--packing/--no-packing``."""
    kind = type_of(setting)
    if kind.startswith("true or false"):
        return option if default_of(setting) is False else f"{option}/--no-{option.removeprefix('--')}"
    several = ",..." if kind.startswith("list of ") else ""
    values = kind.removeprefix("list of ").replace(", ", "|").replace(" or ", "|")
    for word, metavar in (("integer", "N"), ("number", "N"), ("text", "TEXT"), ("mapping", "MAPPING")):
        values = values.replace(word, metavar)
    return f"{option} {values}{several}"


def _add_settings(groups: dict[str, list[Line]]) -> None:
    """Add the settings that are not shown yet, grouped by their section."""
    shown = {_option(name) for name in HELP_OPTIONS}
    for option, setting in setting_options().items():
        if option not in shown:
            section = setting.rpartition(".")[0]
            heading = help_of(section).rstrip(".") if section else "Other settings"
            line = Line(names=_names(option, setting), text=help_of(setting), default=_default(setting))
            groups.setdefault(heading, []).append(line)
