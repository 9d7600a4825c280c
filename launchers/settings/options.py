"""Command-line options of a run: one per setting, named after it with dashes (``--lora-rank``)."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from typing import Any, get_args

from estimator.errors import UserError
from estimator.names import check_options
from estimator.option_names import option_name
from launchers.settings import annotation_of, dotted_names

NEGATION = "--no-"
_BOOLEAN_WORDS = ("true", "false", "auto", "yes", "no", "on", "off")


def setting_options() -> dict[str, str]:
    """Return option -> dotted setting: ``{"--lora-rank": "lora.rank"}``."""
    return {option_name(setting): setting for setting in dotted_names()}


def all_options() -> set[str]:
    """Return the options of all settings, and ``--no-NAME`` for boolean ones."""
    settings = setting_options()
    return {*settings, *(f"{NEGATION}{name[2:]}" for name, setting in settings.items() if _is_bool(setting))}


def translate(
    arguments: Sequence[str], parameters: Collection[str], other_options: Iterable[str]
) -> list[str]:
    """Replace options of settings by ``--set NAME=VALUE``, or by the flow parameter of the same name.

    ``parameters``: options of flow parameters that take a value. ``other_options``: all other options of the
    command. Raises UserError for an option that does not exist, or has no value.
    """
    check_options(arguments, {*all_options(), *parameters, *other_options})
    settings = setting_options()
    translated: list[str] = []
    remaining = list(arguments)
    while remaining:
        argument = remaining.pop(0)
        name, equals, value = argument.partition("=")
        negated = name.startswith(NEGATION) and name not in parameters
        option = f"--{name.removeprefix(NEGATION)}" if negated else name
        setting = settings.get(option)
        if setting is None:
            translated.append(argument)
            continue
        if negated:
            value = "false"
        elif not equals and _is_bool(setting):
            value = remaining.pop(0) if remaining and remaining[0].lower() in _BOOLEAN_WORDS else "true"
        elif not equals:
            if not remaining:
                raise UserError(f"{name} has no value.", f"Write {name} VALUE.")
            value = remaining.pop(0)
        translated += _setting_arguments(option, setting, value, parameters)
    return translated


def _setting_arguments(option: str, setting: str, value: str, parameters: Collection[str]) -> list[str]:
    """Return the command-line arguments for a setting: its flow parameter if there is one, else --set."""
    if option in parameters:
        return [option, value]
    return ["--set", f"{setting}={_format_value(setting, value)}"]


def _format_value(setting: str, value: str) -> str:
    """Format a value for ``--set``: text is quoted, a comma-separated list is put in brackets."""
    kind = annotation_of(setting)
    if kind is str or set(get_args(kind)) == {str, type(None)}:
        return json.dumps(value)
    if "tuple" in str(kind) and "," in value and not value.startswith("["):
        return f"[{value}]"
    return value


def _is_bool(setting: str) -> bool:
    kind: Any = annotation_of(setting)
    return kind is bool or bool in get_args(kind)
