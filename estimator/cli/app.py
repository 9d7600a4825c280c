"""The ``finetune`` command: lazily loaded subcommands, and the output of errors."""

from __future__ import annotations

import errno
import importlib
import re
import shlex
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from estimator import interrupts, logs
from estimator.cli.help import PlainHelp
from estimator.errors import USER_ERROR_STATUS, CannotFit, UserError, impossible_paths_refused
from estimator.names import check_options, did_you_mean
from estimator.terminal import PIPE_CLOSED, discard_output, ended_by_closed_pipe, open_closed_streams, print

# To add a command, add a line here and a file estimator/cli/NAME.py with a function NAME; a command that
# needs Metaflow goes into flows/. --help lists the commands in this order, under the headings of GROUPS.
COMMANDS = {
    "run": "Fine-tune a model, on this machine or with --with kubernetes, --with batch.",
    "check": "Check whether a cluster is fit for training: its nodes and network.",
    "flow": "Run any command of a flow: resume, card view, logs, argo-workflows create.",
    "fetch": "Fetch weights and data in advance, for nodes without internet access.",
    "convert": "Convert a configuration of axolotl, LLaMA-Factory, TRL or torchtune.",
    "plan": "Rank the configurations that train a model within the given goals.",
    "estimate": "Estimate memory, speed and price of one configuration.",
    "gpus": "List GPUs and instance types with memory, speed and price.",
    "models": "List the models known by name.",
    "settings": "List and search the settings of a run.",
    "chat": "Chat with a finished model in the terminal.",
    "serve": "Serve a finished model to OpenAI clients, here or on Kubernetes.",
    "runs": "Compare runs: differing settings, loss, prediction and measurement, price.",
    "costs": "Sum up the costs of runs by user, team or model.",
    "rightsize": "Compare requested and used resources of your flows' steps; print better requests.",
    "doctor": "Diagnose the installation: what works here, and how to fix the rest.",
}
GROUPS = {
    "Run": ("run", "check", "flow", "fetch"),
    "Plan": ("convert", "plan", "estimate", "gpus", "models", "settings"),
    "Use the model": ("chat", "serve"),
    "Inspect": ("runs", "costs", "rightsize", "doctor"),
}
EXTERNAL_COMMANDS = {
    "run": "flows.commands.flow_commands",
    "check": "flows.commands.flow_commands",
    "flow": "flows.commands.flow_commands",
    "fetch": "flows.commands.fetch",
    "settings": "flows.commands.settings",
    "convert": "flows.commands.convert",
    "chat": "flows.commands.chat",
    "serve": "flows.commands.serve",
    "runs": "flows.commands.runs",
    "costs": "flows.commands.costs",
    "rightsize": "flows.commands.rightsize",
    "doctor": "flows.doctor.command",
}  # by name: this package does not import Metaflow
COMMAND_ALIASES = {
    "train": "run",
    "finetune": "run",
    "explain": "estimate --breakdown",
    "resume": "flow resume",
    "card": "flow card",
    "logs": "flow logs",
    "config": "settings",
    "test": "check",
}  # alternative names of commands
NOTHING_FITS_STATUS = 1  # exit status if nothing fits
LOG_LEVEL = "--log-level"
INTERRUPTED = 130  # exit status in a shell of a program ended by SIGINT
_USAGE_ERROR: Any = typer.BadParameter.__base__  # base of all errors of a command line


class Commands(TyperGroup):
    """Group of commands that imports only the module of the command called."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Record the command line, from which suggested commands are derived if no plan fits."""
        ctx.meta["command"] = shlex.join([ctx.info_name or "finetune", *args])
        return super().parse_args(ctx, _log_level_first(args))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the list of commands."""
        with ended_by_closed_pipe():
            super().format_help(ctx, formatter)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Replace the placeholder of the called command by the command from its module."""
        if args and args[0] not in COMMANDS:
            advice = f"Choose one of {', '.join(COMMANDS)}."
            command_of_name = {name: name for name in COMMANDS} | COMMAND_ALIASES
            raise UserError(
                f"There is no command {args[0]}.",
                did_you_mean(args[0], command_of_name, n=1, shown=command_of_name) or advice,
            )
        name, _, remaining = super().resolve_command(ctx, args)
        command = load(str(name))
        if not command.ignore_unknown_options:  # otherwise a flow parses its options
            options = {text for option in command.params for text in (*option.opts, *option.secondary_opts)}
            check_options(remaining, {"--help", *options})
        return name, command, remaining

    def invoke(self, ctx: Any) -> Any:
        """Run the command. User errors print two lines and exit with 2; interrupts are silent."""
        interrupts.raise_again()
        try:
            with impossible_paths_refused():
                result = super().invoke(ctx)
            sys.stdout.flush()
        except CannotFit as error:
            logs.show_traceback(error)
            _fail(_cannot_fit(error, ctx.meta["command"]), NOTHING_FITS_STATUS)
        except UserError as error:
            logs.show_traceback(error)
            _fail(str(error), USER_ERROR_STATUS)
        except _USAGE_ERROR as error:  # an invalid value, a missing value or option
            command = error.ctx.command_path if error.ctx else f"finetune {ctx.invoked_subcommand}"
            _fail(f"{_plain(error)}\nRun {command} --help for the options.", USER_ERROR_STATUS)
        except KeyboardInterrupt:
            raise SystemExit(INTERRUPTED) from None
        except BrokenPipeError:
            discard_output()
            raise SystemExit(PIPE_CLOSED) from None
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            logs.show_traceback(error)
            discard_output()
            place = error.filename or "the output or a file"
            _fail(f"{error.strerror}, for {place}.\nFree space there, then run again.", USER_ERROR_STATUS)
        return result


def _log_level_first(args: list[str]) -> list[str]:
    """Move ``--log-level LEVEL`` to the front, so that it may also follow the subcommand."""
    end = args.index("--") if "--" in args else len(args)
    first: list[str] = []
    remaining: list[str] = []
    arguments = iter(args[:end])
    for argument in arguments:
        if argument == LOG_LEVEL:
            first += [argument, *([value] if (value := next(arguments, None)) is not None else [])]
        else:
            (first if argument.startswith(f"{LOG_LEVEL}=") else remaining).append(argument)
    return [*first, *remaining, *args[end:]]


def load(name: str) -> Any:
    """Import the typer command of that name from ``estimator/cli/NAME.py``, or from ``EXTERNAL_COMMANDS``."""
    module = importlib.import_module(EXTERNAL_COMMANDS.get(name, f"estimator.cli.{name}"))
    program = typer.Typer(add_completion=False)
    kind = getattr(module, "FlowCommand", PlainHelp)
    function = getattr(module, name)
    program.command(name, cls=kind, help=function.__doc__ or COMMANDS[name])(function)
    return typer.main.get_command(program)


def _cannot_fit(error: CannotFit, command: str) -> str:
    from estimator.planning.summary import render_cannot_fit

    # `finetune plan` plans for a cluster with --no-here, where `finetune run` has --with
    error.suggestions = tuple(
        {"here": False} if "with" in suggestion else suggestion for suggestion in error.suggestions
    )
    return render_cannot_fit(error, command)


def _plain(error: Any) -> str:
    """Return the message of a command-line error in plain words."""
    text = str(error.format_message())
    text = re.sub(r"^Got unexpected extra argument(\(s\)|s)? \((.*)\)", r"Unexpected argument: \2", text)
    text = re.sub(r"is not a valid int(eger)?( range)?", "is not a whole number", text)
    return re.sub(r"is not a valid float( range)?", "is not a number", text)


def _fail(text: str, status: int) -> None:
    sys.stdout.flush()
    print(text, file=sys.stderr)
    raise SystemExit(status)


def _version(requested: bool) -> None:
    if requested:
        from importlib.metadata import version

        with ended_by_closed_pipe():
            print(f"finetune {version('metaflow-finetune')}")
        raise typer.Exit


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(
    help="Fine-tune language models: plan hardware, time and price; run; measure; check clusters.",
    epilog="Without Metaflow: `python -m launchers` trains under Slurm or PBS, `python -m checklist` tests "
    "a cluster.",
)
def finetune(
    version: Annotated[  # noqa: ARG001 - its callback prints it
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    log_level: Annotated[
        str | None,
        typer.Option(
            LOG_LEVEL,
            metavar="LEVEL",
            help=f"Log level on standard error: {', '.join(logs.LEVELS)}. May follow the command; "
            f"same as {logs.LEVEL_VARIABLE}=LEVEL.",
        ),
    ] = None,
) -> None:
    """Apply the options of ``finetune`` itself, except ``--version``, which has a callback."""
    logs.setup(log_level)


def _placeholder(summary: str) -> Callable[[], None]:
    def stand_in() -> None:
        """Placeholder of a command that has not been imported."""

    stand_in.__doc__ = summary
    return stand_in


for _name, _summary in COMMANDS.items():
    _group = next(group for group, names in GROUPS.items() if _name in names)
    app.command(_name, help=_summary, rich_help_panel=_group)(_placeholder(_summary))


def main() -> None:
    """Run the console script."""
    open_closed_streams()
    app(prog_name="finetune")


if __name__ == "__main__":
    main()
