"""Suggested changes of options, as data: messages, the planner page and printed commands show them."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from estimator.option_names import option_arguments, option_name

Suggestion = dict[str, object]
"""New values by setting, to be changed together. None removes the option from the command.

Besides settings: goals of ``finetune plan`` (``budget_usd``), ``here``, and Metaflow's ``with``.
"""

# Options that contradict a suggested one
_CONTRADICTS = {
    "resources.instance_type": (
        "resources.gpu",
        "resources.gpus",
        "resources.cloud",
        "max_nodes",
        "max_gpus",
    ),
    "resources.gpus": ("max_gpus", "max_nodes"),
}


def format_suggestion(suggestion: Suggestion) -> str:
    """Format a suggestion as options: "--method qlora --engine torchtune, without --zero-stage"."""
    removed = [option_name(setting) for setting, value in suggestion.items() if value is None]
    parts = [shlex.join(_words(suggestion))] if len(removed) < len(suggestion) else []
    return ", ".join([*parts, *(f"without {name}" for name in removed)])


def apply_suggestion(command: Sequence[str], suggestion: Suggestion) -> list[str]:
    """Return a command line with the suggested options, without those that they replace or contradict."""
    dropped = {option_name(setting) for setting in (*suggestion, *contradicting(suggestion))}
    remaining: list[str] = []
    number = 0
    while number < len(command):
        name, equals, value = command[number].partition("=")
        following = not equals and command[number + 1 : number + 2]
        if name == "--set":
            value = command[number + 1] if following else value
            drop = value.partition("=")[0] in suggestion
        else:
            drop = name in dropped or name.replace("--no-", "--", 1) in dropped
        width = 2 if following and (name == "--set" or (drop and not following[0].startswith("--"))) else 1
        if not drop:
            remaining += command[number : number + width]
        number += width
    return remaining + _words(suggestion)


def contradicting(suggestion: Suggestion) -> set[str]:
    """Return the settings to leave empty next to a suggestion, as they contradict it."""
    return {
        contradicted for setting in suggestion for contradicted in _CONTRADICTS.get(setting, ())
    } - suggestion.keys()


def _words(suggestion: Suggestion) -> list[str]:
    return [
        argument
        for setting, value in suggestion.items()
        if value is not None
        for argument in option_arguments(setting, value)
    ]
