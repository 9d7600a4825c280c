"""finetune convert: a configuration of another tool as settings of this package."""

from __future__ import annotations

import sys
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated

import typer

from estimator.formatting import printable
from estimator.terminal import print, write_data

if TYPE_CHECKING:
    from launchers.settings.convert import Conversion


def convert(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="YAML file of axolotl, LLaMA-Factory, TRL or torchtune.")
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="File for the settings [default: standard output]"),
    ] = None,
    gpus: Annotated[
        int,
        typer.Option(
            min=1, help="Number of GPUs that the configuration was made for; the global batch follows."
        ),
    ] = 1,
    task: Annotated[
        str | None, typer.Option(help="Task of a TRL file: sft, dpo, orpo, kto, grpo [default: sft]")
    ] = None,
    plan: Annotated[
        bool, typer.Option("--plan", help="Also print the plan of the settings; needs --output.")
    ] = False,
) -> None:
    """Translate a configuration of axolotl, LLaMA-Factory, TRL or torchtune into settings.

    Lists what was translated, what needs no setting, and what has no counterpart.
    """
    import yaml

    from estimator.cli.output import write_text
    from estimator.errors import UserError
    from launchers.settings import convert as conversions

    if plan and output is None:
        raise UserError("--plan needs a settings file.", "Give --output my.yaml too.")
    conversion = conversions.convert(conversions.read(file), gpus=gpus, task=task)
    text = f"# {' '.join(printable(file.name).split())} of {conversion.tool}\n" + yaml.safe_dump(
        conversion.nested(), sort_keys=False, allow_unicode=True
    )
    if output is None:
        write_data(text)
    else:
        write_text(output, text)
    print(report(conversion), file=sys.stderr, flush=True)
    if output is not None:
        print(f"next: finetune run {quote(str(output))}", file=sys.stderr, flush=True)
    if plan:
        from flows.commands.flow_commands import run

        run([str(output), "--plan-only"])


def report(conversion: Conversion) -> str:
    """Format the result of each key."""
    lines = [f"Translated from {conversion.tool}:"]
    lines += [f"  {item.key} -> {item.setting} = {item.result}" for item in conversion.translated]
    if conversion.unneeded:
        lines.append("No setting needed:")
        lines += [f"  {key}: {reason}" for key, reason in conversion.unneeded]
    if conversion.missing:
        lines.append("NOT translated:")
        lines += [f"  {key}  ({reason})" for key, reason in conversion.missing]
    lines.append("All other settings have this package's defaults.")
    return "\n".join(lines)
