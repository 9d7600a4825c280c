"""Command line of the checklist flow: help and options of its ``run``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from checklist.option_help import RARE, help_page
from estimator.cli.help import Line
from estimator.names import check_options
from flows.cluster_check.launch import FlowOptions
from flows.commands import flow_main
from flows.commands.run_options import OF_METAFLOW


def check_help(command: str, *, everything: bool = False) -> str:
    """Format the help of ``command``. ``everything``: with rarely used options and Metaflow's."""
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
        closing=() if everything else [f"--help-all shows {len(RARE)} more options, and Metaflow's."],
        hidden=() if everything else RARE,
    )


def run_checklist(flow: type[Any]) -> None:
    """Run the command line of the checklist flow. Reports unknown options of ``run`` before Metaflow."""
    flow_main.run_flow(
        flow,
        help_page=lambda name, everything: check_help(name, everything=everything),
        translate=_checked,
    )


def _checked(args: Sequence[str], parameters: set[str], switches: set[str]) -> list[str]:
    check_options(args, {*parameters, *switches})
    return list(args)
