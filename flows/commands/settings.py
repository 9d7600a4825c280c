"""finetune settings: list and search the settings of a run, with type, default and meaning."""

from __future__ import annotations

import json
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
    sought = word.replace("-", "_").strip("_").lower()
    names = dotted_names()
    found = [name for name in names if sought in name.replace(".", "_") or sought in name]
    found += [name for name in names if name not in found and word.lower() in help_of(name).lower()]
    other = setting_for_alias(word)
    if other is not None and other in names:
        found = [other, *(name for name in found if name != other)]
    if not found:
        advice = did_you_mean(sought, names) or "`finetune settings` lists all of them."
        raise UserError(f"No setting contains {word!r}.", advice)
    return found


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
    shown = "none" if default is None else default if isinstance(default, str) else json.dumps(default)
    head = f"{name} ({option_name(name)}): {type_of(name)} [default: {shown or 'empty'}]"
    meaning = textwrap.indent(textwrap.fill(help_of(name), WIDTH - 4), "    ")
    return [*textwrap.wrap(head, WIDTH, subsequent_indent="    "), meaning]
