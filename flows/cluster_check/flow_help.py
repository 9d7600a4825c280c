"""Help of ``finetune check``, and of ``run`` of the checklist flow."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from checklist.option_help import help_page
from estimator.cli.help import Line
from flows.cluster_check.launch import FlowOptions
from flows.commands.flow_commands import command_line, split_arguments
from flows.commands.run_options import HELP, HELP_ALL, OF_METAFLOW


def check_help(command: str, *, everything: bool = False) -> str:
    """Format the help of ``command``. ``everything``: with Metaflow's options."""
    backend = Line(names="--with BACKEND", text="Run on kubernetes or batch", default="here")
    more = {"Where": [backend]}
    if everything:
        more["Metaflow"] = [
            Line(names=name, text=text) for name, text in OF_METAFLOW.items() if name != "--with"
        ]
    return help_page(
        f"{command} [FILE.yaml] [OPTIONS]",
        FlowOptions,
        example="finetune check --with kubernetes --nodes 4 --gpus-per-node 8",
        more=more,
        closing=() if everything else ["--help-all shows Metaflow's options, too."],
    )


def print_requested_help(args: Sequence[str]) -> None:
    """Print the help and exit if these arguments of the flow's file are ``run --help`` or ``--help-all``."""
    _, run_options = split_arguments(args)
    if run_options[:1] == ["run"] and HELP & set(run_options):
        name = command_line(sys.argv[0], ["run"])
        print(check_help(name, everything=HELP_ALL in run_options))
        raise SystemExit(0)
