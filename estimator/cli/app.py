"""The ``finetune`` command: its subcommands, each loaded when it is called, and how mistakes are shown."""

from __future__ import annotations

import importlib
import os
import shlex
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from estimator import logs
from estimator.changes import FINETUNE
from estimator.cli.help import PlainHelp
from estimator.errors import MISTAKE, CannotFit, UserError
from estimator.names import check_options, did_you_mean

# To add a command, add a line here and a file estimator/cli/NAME.py with a function NAME; one that knows
# Metaflow lies among the flows.
# The commands stand in --help as here, under the headings of GROUPS.
COMMANDS = {
    "run": "Fine-tune a model, on this machine or with --with kubernetes, --with batch.",
    "check": "Is a cluster fit to train on? Tests its nodes and the network between them.",
    "flow": "Any command of a flow: resume, card view, logs, argo-workflows create.",
    "convert": "Settings from a configuration of axolotl, LLaMA-Factory, TRL or torchtune.",
    "plan": "The best configurations for a model, from goals to a ranked list.",
    "estimate": "Memory, speed and price of one configuration.",
    "gpus": "GPUs and machines: memory, speed, price.",
    "models": "Models that are known by name.",
    "settings": "Settings of a run: name, type, default, meaning. Searches them.",
    "chat": "Ask a finished model on the terminal.",
    "serve": "Serve a finished model to OpenAI clients, here or on Kubernetes.",
    "runs": "Runs of the flow beside each other: what differs, loss, predicted and measured, price.",
    "costs": "What runs have cost, by user, team or model.",
    "doctor": "What is installed, what would work here, and what mends the rest.",
}
GROUPS = {
    "Run": ("run", "check", "flow"),
    "Plan, with nothing run": ("convert", "plan", "estimate", "gpus", "models", "settings"),
    "Use the model": ("chat", "serve"),
    "Look back, look around": ("runs", "costs", "doctor"),
}
ELSEWHERE = {
    "run": "flows.commands.flow_commands",
    "check": "flows.commands.flow_commands",
    "flow": "flows.commands.flow_commands",
    "settings": "flows.commands.settings",
    "convert": "flows.commands.convert",
    "chat": "flows.commands.chat",
    "serve": "flows.commands.serve",
    "runs": "flows.commands.runs",
    "costs": "flows.commands.costs",
    "doctor": "flows.doctor.command",
}  # by name: nothing here knows Metaflow
OTHER_NAMES = {
    "train": "run",
    "finetune": "run",
    "explain": "estimate --breakdown",
    "resume": "flow resume",
    "card": "flow card",
    "logs": "flow logs",
    "config": "settings",
    "test": "check",
}  # what people call a command: its name here
ANSWERED_NO = 1  # nothing fits
LOG_LEVEL = "--log-level"
INTERRUPTED, PIPE_CLOSED = 130, 141  # as a shell reports a program ended by SIGINT, SIGPIPE


class Commands(TyperGroup):
    """Loads a command's module when that command is called, and no other's."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Note the command line as it was typed, for the commands that are suggested where no plan fits."""
        ctx.meta["command"] = shlex.join([ctx.info_name or "finetune", *args])
        return super().parse_args(ctx, _log_level_first(args))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Replace the stand-in of the command that was called by the command itself, from its module."""
        if args and args[0] not in COMMANDS:
            known = f"Choose one of {', '.join(COMMANDS)}."
            shown = {name: name for name in COMMANDS} | OTHER_NAMES
            raise UserError(
                f"There is no command {args[0]}.", did_you_mean(args[0], shown, n=1, shown=shown) or known
            )
        name, _, rest = super().resolve_command(ctx, args)
        command = load(str(name))
        if not command.ignore_unknown_options:  # else a flow reads them, by its own names
            options = {text for option in command.params for text in (*option.opts, *option.secondary_opts)}
            check_options(rest, {"--help", *options}, FINETUNE)
        return name, command, rest

    def invoke(self, ctx: Any) -> Any:
        """Run the command; mistakes are two lines and status 2, an interrupt and a closed pipe are silent."""
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
        except CannotFit as error:
            logs.show_traceback(error)
            _fail(_cannot_fit(error, ctx.meta["command"]), ANSWERED_NO)
        except UserError as error:
            logs.show_traceback(error)
            _fail(str(error), MISTAKE)
        except KeyboardInterrupt:
            raise SystemExit(INTERRUPTED) from None
        except BrokenPipeError:
            # What is still buffered would raise once more when Python ends
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise SystemExit(PIPE_CLOSED) from None
        return result


def _log_level_first(args: list[str]) -> list[str]:
    """Move ``--log-level LEVEL`` to the front, so that it may also follow the subcommand."""
    end = args.index("--") if "--" in args else len(args)
    first: list[str] = []
    rest: list[str] = []
    arguments = iter(args[:end])
    for argument in arguments:
        if argument == LOG_LEVEL:
            first += [argument, *([value] if (value := next(arguments, None)) is not None else [])]
        else:
            (first if argument.startswith(f"{LOG_LEVEL}=") else rest).append(argument)
    return [*first, *rest, *args[end:]]


def load(name: str) -> Any:
    """The typer command of that name, from ``estimator/cli/NAME.py``, or from ``ELSEWHERE``."""
    module = importlib.import_module(ELSEWHERE.get(name, f"estimator.cli.{name}"))
    program = typer.Typer(add_completion=False)
    kind = getattr(module, "FlowCommand", PlainHelp)
    program.command(name, cls=kind, help=_help(module, name))(getattr(module, name))
    return typer.main.get_command(program)


def _help(module: Any, name: str) -> str:
    return getattr(module, name).__doc__ or COMMANDS[name]


def _cannot_fit(error: CannotFit, command: str) -> str:
    from estimator.planning.summary import render_cannot_fit

    return render_cannot_fit(error, command)


def _fail(text: str, status: int) -> None:
    sys.stdout.flush()
    print(text, file=sys.stderr)
    raise SystemExit(status)


def _version(requested: bool) -> None:
    if requested:
        from importlib.metadata import version

        print(f"finetune {version('metaflow-finetune')}")
        raise typer.Exit


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(
    help="Fine-tune language models: plan (which GPUs, how many, how long, how much), run, measure, check.",
    epilog="Without Metaflow: python -m launchers trains under Slurm or PBS, python -m checklist checks.",
)
def finetune(
    version: Annotated[  # noqa: ARG001 - its callback prints it
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and end.")
    ] = False,
    log_level: Annotated[
        str | None,
        typer.Option(
            LOG_LEVEL,
            metavar="LEVEL",
            help=f"Show log messages on standard error: {', '.join(logs.LEVELS)}. Also after a command; "
            f"{logs.LEVEL_VARIABLE}=LEVEL does the same.",
        ),
    ] = None,
) -> None:
    """Apply the options of the command itself; the callback of ``--version`` handles that one."""
    logs.setup(log_level)


def _stand_in_for(summary: str) -> Callable[[], None]:
    def stand_in() -> None:
        """Stands for a command in the list of commands, until it is called."""

    stand_in.__doc__ = summary
    return stand_in


for _name, _summary in COMMANDS.items():
    _group = next(group for group, names in GROUPS.items() if _name in names)
    app.command(_name, help=_summary, rich_help_panel=_group)(_stand_in_for(_summary))


def main() -> None:
    """The console script."""
    app(prog_name="finetune")


if __name__ == "__main__":
    main()
