"""finetune settings: list and search the settings of a run, with type, default and meaning."""

from __future__ import annotations

import json
import re
import textwrap
from typing import Annotated

from typer import Argument, Option

from estimator.cli import output
from estimator.errors import UserError
from estimator.names import did_you_mean
from estimator.option_names import option_name, setting_for_alias
from estimator.terminal import print
from launchers.settings import default_of, dotted_names, help_of, type_of

WIDTH = 80


def settings(
    word: Annotated[
        str | None, Argument(metavar="[WORD]", help="Part of a name or of a description.")
    ] = None,
    as_json: Annotated[bool, Option("--json", help="Print one JSON array.")] = False,
) -> None:
    """List the settings of `finetune run`, or those that contain WORD in their name or description."""
    names = dotted_names() if word is None else _search(word)
    if as_json:
        output.print_json([_record(name) for name in names])
        return
    print("\n".join(line for name in names for line in _lines(name)))


def _search(word: str) -> list[str]:
    """Names of the settings that match: by name first, else by description. UserError if none does."""
    normalized = word.replace("-", "_").strip("_").lower()
    names = dotted_names()
    matches = [name for name in names if normalized in name.replace(".", "_") or normalized in name]
    matches += [name for name in names if name not in matches and word.lower() in help_of(name).lower()]
    setting = setting_for_alias(word)
    if setting is not None and setting in names:
        matches = [setting, *(name for name in matches if name != setting)]
    if not matches:
        words = dict.fromkeys(re.findall("[a-z]{4,}", " ".join(map(help_of, names)).lower()))
        advice = did_you_mean(normalized, [*names, *words]) or "`finetune settings` lists all of them."
        raise UserError(f"No setting contains {word!r}.", advice)
    return matches


def _record(name: str) -> dict[str, object]:
    return {
        "name": name,
        "option": option_name(name),
        "type": type_of(name),
        "default": default_of(name),
        "meaning": help_of(name),
    }


def _lines(name: str) -> list[str]:
    default = default_of(name)
    default_text = "none" if default is None else default if isinstance(default, str) else json.dumps(default)
    heading = f"{name} ({option_name(name)}): {type_of(name)} [default: {default_text or 'empty'}]"
    meaning = textwrap.indent(textwrap.fill(help_of(name), WIDTH - 4), "    ")
    return [*textwrap.wrap(heading, WIDTH, subsequent_indent="    "), meaning]
