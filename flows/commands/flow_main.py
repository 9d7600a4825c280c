"""Entry point of the flow files: help and options of ``run``, then Metaflow's command line."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from decorators._metaflow import command_names, main, run_parameters
from estimator import logs
from estimator.errors import USER_ERROR_STATUS, UserError
from estimator.names import did_you_mean
from estimator.terminal import ended_by_closed_pipe, print
from flows.commands.flow_commands import FLOWS, command_line, split_arguments
from flows.commands.run_logs import recorded_launch
from flows.commands.run_options import HELP, HELP_ALL, OF_METAFLOW

Translate = Callable[[Sequence[str], set[str], set[str]], list[str]]


def run_flow(flow: type[Any], *, help_page: Callable[[str, bool], str], translate: Translate) -> None:
    """Run the command line of a flow's file.

    Parameters
    ----------
    help_page:
        Function of the flow's command and whether to show all options that formats the help of ``run``.
    translate:
        Function of the options after ``run``, the names of the parameters with a value, and those of all
        other options; it returns the options for Metaflow and raises UserError for an unknown one.
    """
    try:
        sys.argv[1:] = _run_arguments(flow, sys.argv[1:], help_page, translate)
    except UserError as error:
        logs.show_traceback(error)
        print(error, file=sys.stderr)
        raise SystemExit(USER_ERROR_STATUS) from None
    with recorded_launch():
        main(flow, command_line)


def _run_arguments(
    flow: type[Any], args: Sequence[str], help_page: Callable[[str, bool], str], translate: Translate
) -> list[str]:
    """Translate the options of the command ``run``, or print its help and exit.

    Raises UserError for an unknown command.
    """
    options, run_options = split_arguments(args)
    if run_options[:1] != ["run"]:
        if args and not args[0].startswith("-"):
            _check_command(flow, args[0])
        return list(args)
    if HELP & set(run_options):
        with ended_by_closed_pipe():
            print(help_page(command_line(sys.argv[0], ["run"]), HELP_ALL in run_options))
        raise SystemExit(0)
    parameters, switches = run_parameters(flow)
    return [*options, "run", *translate(run_options[1:], set(parameters), {*switches, *OF_METAFLOW})]


def _check_command(flow: type[Any], name: str) -> None:
    commands = command_names(flow)
    if name not in commands:
        help_command = command_line(sys.argv[0], ["--help"])
        advice = did_you_mean(name, [*commands, *FLOWS]) or f"`{help_command}` lists the commands."
        raise UserError(f"There is no flow or command {name}.", advice)
