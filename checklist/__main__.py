"""``python -m checklist`` (two local nodes), or the same under torchrun or srun (one process for each rank).

Exit status: 0 pass or warn, 1 fail, 2 could not run, 3 no verdict, 130 ended by Ctrl-C. An output that fails
after the run is reported on standard error and does not change it.
"""

from __future__ import annotations

import inspect
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from checklist.options import CommandOptions, Options, build, flags, help_of, type_of
from checklist.reference import read as read_reference
from checklist.run.rendezvous import NO_SECRET, Rendezvous, from_environment
from estimator import logs
from estimator.errors import USER_ERROR_STATUS, UserError
from estimator.terminal import ended_by_closed_pipe, print

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

    from checklist.measurements import Measurements
    from checklist.outputs.publish import Outputs
    from checklist.past_runs import History
    from checklist.result import Result

COULD_NOT_RUN = USER_ERROR_STATUS
INTERRUPTED = 128 + signal.SIGINT  # as shells say it; typer would end with 1, which is FAIL here
NODE_NAME = "NODE_NAME"  # where a pod's downward API puts the node's name; the probes read it

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def _command(function: Callable[[CommandOptions, set[str]], None]) -> Callable[..., None]:
    """Convert a function to a command with a flag per option.

    The function receives the options, and the names of those that the user set.
    """

    def command(**values: Any) -> None:
        try:
            logs.setup()
            options = build(CommandOptions, values)
        except UserError as error:
            logs.show_traceback(error)
            print(error, file=sys.stderr)
            raise typer.Exit(COULD_NOT_RUN) from None
        function(options, {name for name, value in values.items() if value is not None})

    parameters = [_parameter(name, field) for name, field in flags(CommandOptions).items()]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    command.__doc__ = function.__doc__
    return command


def _parameter(name: str, field: FieldInfo) -> inspect.Parameter:
    kind: Any = type_of(field)
    text, default = help_of(field), field.default
    if kind is tuple or default is None or "(default:" in text:
        kind, default = (list[str] if kind is tuple else kind) | None, None
    option = typer.Option("--" + name.replace("_", "-"), help=text)
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option]
    )


class _Help(TyperCommand):
    def format_help(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002 - typer's signature
        from checklist.option_help import help_page

        example = "srun --nodes=4 --ntasks-per-node=8 python -m checklist --profile standard"
        with ended_by_closed_pipe():
            typer.echo(help_page(f"{ctx.command_path} [OPTIONS]", CommandOptions, example=example))


@app.command(cls=_Help)
@_command
def checklist(options: CommandOptions, given_options: set[str]) -> None:
    """Test whether this cluster is fit for training, and name the node, link, direction or GPU at fault."""
    from checklist.outputs.publish import outputs_of

    try:
        rendezvous = from_environment()
        leads = rendezvous is None or rendezvous.is_leader
        if rendezvous is not None and leads and not rendezvous.secret:
            _print_errors(NO_SECRET)
        nodes = rendezvous.nodes if rendezvous and "nodes" not in given_options else options.nodes
        check_options = options.options(nodes=nodes, directory=options.directory, datastore=options.datastore)
        run = check_options.of_nodes()
        outputs = outputs_of(options, cluster=options.cluster, context=options.context)
        conclude = _Judge(check_options, _prepare(outputs, options.json, options.history)) if leads else None
        status = _measure(run, rendezvous, options.keep, options.node_name, conclude)
    except UserError as error:
        logs.show_traceback(error)
        print(error, file=sys.stderr)
        raise typer.Exit(COULD_NOT_RUN) from None
    except KeyboardInterrupt:
        _print_errors("Ended by Ctrl-C, without a verdict.")
        raise typer.Exit(INTERRUPTED) from None
    if conclude is not None:
        _publish(conclude.result, outputs, options.json, options.history)
    raise typer.Exit(status)


class _Judge:
    """Judges the run on rank 0's host, which has the history. Raises UserError if a file cannot be read."""

    result: Result

    def __init__(self, options: Options, history: History) -> None:
        from checklist.judging.thresholds import table

        self._options, self._past, self._table = options.of_nodes(), history, table(options.thresholds)
        file = options.reference_settings
        self._reference = None if file is None else read_reference(file, options.reference_node)

    def __call__(self, measurements: Measurements) -> int:
        """Judge the measurements and publish the result. Returns the exit status."""
        from checklist.verdict import judge_with_options

        result = judge_with_options(
            measurements, self._options, self._past, thresholds=self._table, reference=self._reference
        )
        self.result = replace(result, notes=(*result.notes, *self._past.problems))
        return result.exit_code


def _prepare(outputs: Outputs, json: Path | None, history: Path | None) -> History:
    """Check files and outputs before the run. Raises UserError."""
    from checklist import past_runs
    from checklist.outputs.publish import check

    if json is not None and (json.is_dir() or not os.access(json.absolute().parent, os.W_OK)):
        raise UserError(f"{json} cannot be written.", "Give --json a file in a folder that exists.")
    runs = past_runs.History()
    if history is not None:
        past_runs.check_writable(history)
        runs = past_runs.read(history)
    _print_errors(*check(outputs), *runs.problems)
    return runs


def _measure(
    options: Options,
    rendezvous: Rendezvous | None,
    keep: Path | None,
    node_name: str | None,
    conclude: _Judge | None,
) -> int:
    """Run the checks; return rank 0's exit status on every rank."""
    if rendezvous is None:
        from checklist.run.local import run_local

        if node_name is not None:
            raise UserError(
                "--node-name names one host, and all nodes of this run are local.",
                "Leave it out, or use a launcher.",
            )
        measurements = run_local(options, directory=keep)
        return COULD_NOT_RUN if conclude is None else conclude(measurements)
    from checklist.run.node_agent import take_part

    if node_name is not None:
        os.environ[NODE_NAME] = node_name
    if options.gpus_per_node is None:
        started = max(1, rendezvous.world // rendezvous.nodes)
        options = options.model_copy(update={"gpus_per_node": started})
    end = take_part(options, rendezvous, directory=keep, conclude=conclude)
    return COULD_NOT_RUN if end.status is None else end.status


def _publish(result: Result, outputs: Outputs, json: Path | None, history: Path | None) -> None:
    """Store the result, then publish it; report each failure as a line on standard error."""
    from checklist import past_runs
    from checklist.outputs.publish import publish
    from checklist.outputs.terminal import show

    if json is not None:
        _write_result(result, json)
    if history is not None:
        try:
            past_runs.append(result, history)
        except UserError as error:
            _print_errors(error.problem)
    reports = publish(result, outputs)
    show(result)
    for item in reports:
        for line in item.lines:
            print(line, file=sys.stderr if item.failed else sys.stdout)


def _write_result(result: Result, json: Path) -> None:
    """Write the result, or, if that fails, write it to the temporary folder."""
    from checklist.result import write

    try:
        write(result, json)
    except UserError as error:
        fallback = Path(tempfile.mkdtemp(prefix="checklist-")) / json.name
        try:
            write(result, fallback)
        except UserError:
            _print_errors(error.problem)
        else:
            _print_errors(f"{error.problem} It is in {fallback} instead.")


def _print_errors(*lines: str) -> None:
    for line in lines:
        print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    app()
