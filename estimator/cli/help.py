"""Help pages of ``finetune``: options grouped by purpose, at most 80 columns wide."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import typer
from typer.core import TyperCommand, TyperOption

GROUPS = ("Model and data", "Method", "Training", "Where", "Output")
"""Groups of options, in the order of a help page."""
MORE = "More: "
"""Prefix of the groups that only ``--help-all`` shows."""
DEFAULT = "[default: "
HELP_ALL = "--help-all"
WIDTH = 80
_NAMES = 29  # columns for option names
_METAVARS = {
    "by": "GROUP",
    "fp8": "SCALING",
    "lora_targets": "LAYERS",
    "modules_to_save": "MODULES",
    "offload_to": "DEVICE",
    "over": "OPTION",
    "overrides": "NAME=VALUE",
    "prefer": "GOAL",
    "recompute_what": "SCOPE",
    "since": "TIME",
    "system": "TEXT",
    "vision": "TOWER",
}
_UNITS = ("HOURS", "USD", "GBPS")
EXAMPLES = {
    "plan": "finetune plan --model llama-8b --method lora --tokens 100M",
    "estimate": "finetune estimate --model llama-8b --method lora --gpu L40S",
    "chat": "finetune chat --with-base",
    "run": "finetune run --model llama-8b --method lora --with kubernetes",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One option of a help page. ``default``: default value as text; empty: none."""

    names: str
    text: str
    default: str = ""


def page(
    usage: str,
    summary: str,
    groups: Mapping[str, Sequence[Line]],
    *,
    example: str = "",
    closing: Iterable[str] = (),
) -> str:
    """Format a help page: usage, summary, an example, each group with its options, closing lines."""
    lines = [f"Usage: {usage}", "", *textwrap.wrap(summary, WIDTH)]
    if example:
        lines += ["", f"Example: {example}"]
    for name, options in groups.items():
        heading = name.removeprefix(MORE)
        lines += ["", f"{heading[0].upper()}{heading[1:]}:"]
        for option in options:
            lines += _option(option)
    return "\n".join([*lines, "", *(line for text in closing for line in textwrap.wrap(text, WIDTH))])


def _option(option: Line) -> list[str]:
    text = option.text.rstrip(".") + (f" {DEFAULT}{option.default}]" if option.default else "")
    names = f"  {option.names}"
    text_lines = textwrap.wrap(text, WIDTH - _NAMES, break_long_words=False, break_on_hyphens=False)
    if len(names) >= _NAMES:
        return [names, *(" " * _NAMES + line for line in text_lines)]
    first, *continuation = text_lines or [""]
    return [f"{names:{_NAMES}}{first}".rstrip(), *(" " * _NAMES + line for line in continuation)]


class PlainHelp(TyperCommand):
    """Command whose ``--help`` is one page; ``--help-all`` adds the groups that begin with ``More:``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if any(_group(option).startswith(MORE) for option in self.params):
            visible = TyperOption(
                param_decls=[HELP_ALL],
                is_flag=True,
                is_eager=True,
                expose_value=False,
                callback=self._show_all,
                help="Show all options and exit.",
            )
            self.params.append(visible)

    def _show_all(self, context: Any, _: Any, requested: bool) -> None:
        if requested:
            typer.echo(self._page(context, show_all=True))
            raise typer.Exit

    def format_help(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002 - typer's signature
        """Print the page of the options that most people use."""
        typer.echo(self._page(ctx, show_all=False))

    def _page(self, context: Any, *, show_all: bool) -> str:
        from estimator.cli.common import COMMON

        groups: dict[str, list[Line]] = {name: [] for name in ("Arguments", *GROUPS)}
        arguments, hidden = [], 0
        order = [*COMMON]
        options = sorted(
            self.params, key=lambda each: order.index(each.name) if each.name in order else len(order)
        )
        for option in options:
            if not isinstance(option, TyperOption):
                arguments.append(str(option.make_metavar(ctx=context)))
                if text := getattr(option, "help", None):  # click's own arguments have none
                    groups["Arguments"].append(Line(names=arguments[-1], text=text))
            elif option.opts == [HELP_ALL]:
                continue
            elif not show_all and _group(option).startswith(MORE):
                hidden += 1
            else:
                groups.setdefault(_group(option), []).append(_line(option, context))
        usage = " ".join([context.command_path, *arguments, "[OPTIONS]"])
        closing = f"{HELP_ALL} shows {hidden} more options."
        return page(
            usage,
            " ".join((self.help or "").split()),
            {name: lines for name, lines in groups.items() if lines},
            example=EXAMPLES.get(str(self.name), ""),
            closing=[closing] if hidden else (),
        )


def _group(option: Any) -> str:
    return getattr(option, "rich_help_panel", None) or "Options"


def _line(option: TyperOption, context: Any) -> Line:
    from estimator.cli.common import COMMON

    names = ", ".join(sorted(option.opts, key=len))
    negated = "".join(option.secondary_opts[:1])
    opposite = f"--no-{names.removeprefix('--')}"
    if negated and (option.default is True or negated != opposite or len(f"  {names}/{negated}") < _NAMES):
        names += f"/{negated}"
    common = COMMON.get(str(option.name))
    if not option.is_flag:
        names += f" {common.metavar if common else _metavar(option, context)}"
    default = option.default
    if callable(default) or default is None or isinstance(default, bool) or default == "":
        in_text = DEFAULT in (option.help or "")
        default = common.unset if common and default is None and not in_text else ""
    text = f"{option.help or ''}{' (required)' if option.required else ''}"
    return Line(names=names, text=text, default="" if option.required else str(default))


def _metavar(option: TyperOption, context: Any) -> str:
    """Return the name of an option's value: its unit, N for other numbers, the last word of the option."""
    name = str(option.name)
    kind = option.make_metavar(ctx=context).strip("<>").upper()
    if option.metavar or name in _METAVARS:
        return option.metavar or _METAVARS[name]
    last = name.rpartition("_")[2].upper()
    if kind.startswith(("INT", "FLOAT")):
        return last if last in _UNITS else "N"
    return "FILE" if kind == "PATH" else last
