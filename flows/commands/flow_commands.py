"""finetune run, check, flow: run the packaged flows from any folder, through Metaflow's command line.

The process is replaced by ``python FLOW.py ARGUMENTS...``, so start, signals and resume work as with the
files of a clone. Only shell completion imports Metaflow.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from shlex import join
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperOption

from estimator.errors import UserError
from estimator.names import did_you_mean
from flows.commands.run_options import HELP, HELP_ALL, OF_METAFLOW

DEFAULT = "finetune"
FLOWS = {
    DEFAULT: "finetune_flow.py",
    "linear": "finetune_linear_flow.py",  # one node, for Step Functions
    "rejection": "rejection_flow.py",
    "checklist": "checklist_flow.py",
}
RUNS = {"run": DEFAULT, "check": "checklist"}  # finetune's command -> the flow that it runs
CONFIGS = {"run": "settings", "check": "options"}  # name of the YAML file that each takes first
# Options that Metaflow expects before its command, with the number of their values. `finetune run` accepts
# them anywhere.
BEFORE_COMMAND = {
    "--config": 2,
    "--config-value": 2,
    "--datastore": 1,
    "--datastore-root": 1,
    "--environment": 1,
    "--event-logger": 1,
    "--metadata": 1,
    "--mode": 1,
    "--monitor": 1,
    "--no-pylint": 0,
    "--not-quiet": 0,
    "--package-suffixes": 1,
    "--pylint": 0,
    "--quiet": 0,
}


class FlowCommand(TyperCommand):
    """Command that passes all arguments on unchanged, and completes the options of its flow."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # --help is handled by the flow, which knows its options
        super().__init__(*args, **{**kwargs, "add_help_option": False})
        self.ignore_unknown_options = self.allow_interspersed_args = True

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Accept all arguments unparsed, including ``--``, ``--help`` and values that look like options."""
        ctx.params["args"] = list(args)
        ctx.args = []
        return []

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """Complete the options of ``finetune run`` and ``finetune check``."""
        if self.name in RUNS:
            names = sorted(_completions(RUNS[self.name]))
            self.params = [TyperOption(param_decls=[name]) for name in names]
        return super().shell_complete(ctx, incomplete)


def _flow_names(incomplete: str) -> list[str]:
    return [name for name in FLOWS if name.startswith(incomplete)]


Words = Annotated[list[str] | None, typer.Argument(metavar="[OPTION]...")]
FlowWords = Annotated[
    list[str] | None, typer.Argument(metavar="[FLOW] [COMMAND] [OPTION]...", autocompletion=_flow_names)
]


def run(args: Words = None) -> None:
    """Fine-tune a model: plan, train, measure, evaluate, export. Takes every option of the flow's run.

    The first word may be a YAML file of settings; options override it: finetune run FILE.yaml --lr 1e-4
    """
    if HELP & set(args or ()):
        from flows.commands.run_help import help_page

        typer.echo(help_page("finetune run", everything=HELP_ALL in (args or ())))
        return
    check_leading_file(args or ())
    _replace_process(*flow_arguments("run", args or ()))


def check(args: Words = None) -> None:
    """Test a cluster's nodes and the network between them. Takes every option of the flow's run.

    The first word may be a YAML file of options.
    """
    check_leading_file(args or ())
    _replace_process(*flow_arguments("check", args or ()))


def flow(args: FlowWords = None) -> None:
    """Run any command of a flow: resume, card, logs, argo-workflows create.

    The first word may be the flow: finetune (as without it), linear, rejection or checklist.
    """
    _replace_process(*flow_arguments("flow", args or ()))


def flow_arguments(command: str, args: Sequence[str]) -> tuple[str, list[str]]:
    """Return (the flow's file, its arguments) for the arguments of ``finetune run``, ``check``, ``flow``."""
    if command in RUNS:
        return FLOWS[RUNS[command]], _run_arguments(args, CONFIGS[command])
    has_name = bool(args) and args[0] in FLOWS
    return FLOWS[args[0] if has_name else DEFAULT], list(args[has_name:]) or ["--help"]


def _run_arguments(args: Sequence[str], config: str) -> list[str]:
    """Move Metaflow's own options before the command; a leading YAML file is the value of ``config``."""
    if _leading_file(args):
        args = ["--config", config, *args]
    options, run_options = split_arguments(args)
    return [*options, "run", *run_options]


def _leading_file(args: Sequence[str]) -> str:
    """Return the first argument if it names a YAML file, otherwise an empty string."""
    return args[0] if args and args[0].endswith((".yaml", ".yml")) else ""


def _with_leading_file(options: Sequence[str], config: str) -> list[str]:
    """Write ``--config CONFIG FILE.yaml`` as the leading file of ``finetune run`` and ``check``."""
    index = _config_index(options, config)
    if index is None or not _leading_file(options[index + 2 :]):
        return list(options)
    return [options[index + 2], *options[:index], *options[index + 3 :]]


def check_leading_file(args: Sequence[str]) -> None:
    """Raise UserError if the first argument names a YAML file that does not exist."""
    file = _leading_file(args)
    if file and not Path(file).is_file():
        raise UserError(
            f"There is no file {file}.", did_you_mean(file, map(str, Path(file).parent.glob("*.y*ml")))
        )


def split_arguments(args: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split arguments into those that Metaflow expects before its command and the others."""
    options: list[str] = []
    run_options: list[str] = []
    remaining = iter(args)
    for arg in remaining:
        name, has_value, _ = arg.partition("=")
        if name in BEFORE_COMMAND:
            values = BEFORE_COMMAND[name] - bool(has_value)
            options += [arg, *(value for _, value in zip(range(values), remaining, strict=False))]
        else:
            run_options.append(arg)
    return options, run_options


def config_file(args: Sequence[str], config: str) -> Path:
    """Return the path of ``--config CONFIG PATH`` on a flow's command line, or an empty path.

    Metaflow passes only the file's content to a config's parser.
    """
    index = _config_index(args, config)
    return Path("" if index is None else args[index + 2])


def _config_index(args: Sequence[str], config: str) -> int | None:
    """Return the position of ``--config CONFIG PATH``, or None."""
    positions = range(len(args) - 2)
    return next((index for index in positions if args[index : index + 2] == ["--config", config]), None)


def console_script(path: str | None = None) -> str:
    """Return ``finetune`` if PATH (or ``path``) has it, else the path of the script next to this Python."""
    script_path = Path(sys.executable).with_name("finetune")
    if shutil.which("finetune", path=path) or not script_path.is_file():
        return "finetune"
    return os.path.relpath(script_path) if script_path.is_relative_to(Path.cwd()) else str(script_path)


def command_line(script: str, args: Sequence[str], program: str = "finetune") -> str:
    """Format the ``finetune`` command that is equivalent to a flow's file with these arguments."""
    name = next((name for name, file in FLOWS.items() if file == Path(script).name), None)
    if name is None:
        return join(["python", script, *args])  # a user's copy of a flow
    options, run_options = split_arguments(args)
    for command, run_flow in RUNS.items():
        if run_flow == name and run_options[:1] == ["run"]:
            return join([program, command, *_with_leading_file(options, CONFIGS[command]), *run_options[1:]])
    return join([program, "flow", *([] if name == DEFAULT else [name]), *args])


def _replace_process(file: str, args: Sequence[str]) -> NoReturn:
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, str(Path(__file__).parents[1] / file), *args])  # noqa: S606


def _completions(name: str) -> set[str]:
    from decorators._metaflow import run_parameters

    parameters, switches = run_parameters(flow_class(name))
    from launchers.settings.options import all_options

    options = {*parameters, *switches, *OF_METAFLOW, *BEFORE_COMMAND}
    return options | all_options() if name == DEFAULT else options


def flow_class(name: str) -> Any:
    """Import the flow with this name in FLOWS, and return its class."""
    from importlib import import_module

    from metaflow import FlowSpec

    module = import_module(f"flows.{FLOWS[name].removesuffix('.py')}")
    classes: list[Any] = [item for item in vars(module).values() if isinstance(item, type)]
    (kind,) = (item for item in classes if issubclass(item, FlowSpec) and item.__module__ == module.__name__)
    return kind
