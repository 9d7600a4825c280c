"""Errors that end a run: clear messages, exit codes, and no pointless retries."""

from __future__ import annotations

import functools
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from metaflow.datastore import TaskDataStoreSet
from metaflow.exception import METAFLOW_EXIT_DISALLOW_RETRY, MetaflowException, MetaflowInternalError
from metaflow.parameters import flow_context
from metaflow.system_context import ExecutionPhase, system_context
from metaflow.util import get_latest_run_id

from decorators._metaflow.causes import FailureCause, collect_cause
from decorators._metaflow.datastores import check_local_datastore, limit_datastore
from decorators._metaflow.masked_errors import mask_errors, with_asterisks
from decorators._metaflow.signals import forward_signals_to_jobs, was_interrupted
from decorators._metaflow.terminal import renew_steps
from decorators._metaflow.users import ensure_user
from estimator import interrupts, logs
from estimator.errors import USER_ERROR_STATUS, UserError
from estimator.terminal import print
from launchers.base.workdir import is_disk_full, no_space_error
from launchers.cluster.hangup import outlive_shell

_TARGET_OPTIONS = ("--with", "--datastore", "--datastore-root", "--metadata", "--environment")
_ORIGIN = "--origin-run-id"
_MICROMAMBA = "Micromamba"  # beginning of the headline of errors of Metaflow's conda and pypi environments
_NO_SPACE_ADVICE = "Free space there, then run again, or resume a run that had started."


class FinetuneError(MetaflowException):  # type: ignore[misc]
    """User error in the form that Metaflow prints without a traceback: a headline and lines of text."""

    headline = "Error"

    def __init__(self, problem: str, advice: str = "") -> None:
        super().__init__(with_asterisks(f"{problem}\n{advice}" if advice else problem))
        self.problem = problem
        self.advice = advice

    def __reduce__(self) -> tuple[type[FinetuneError], tuple[str, str]]:
        return type(self), (self.problem, self.advice)


class TrainingFailed(FinetuneError):  # noqa: N818 - describes the event
    """Failure of a gang. Its text contains the failing rank's traceback, so Metaflow's is suppressed."""

    headline = "Training failed"


class NotFit(FinetuneError):  # noqa: N818 - describes the verdict
    """Verdict of the checklist that should keep training from starting."""

    headline = "Checklist"


@contextmanager
def user_errors() -> Iterator[None]:
    """Convert a UserError to a FinetuneError; for steps without ``@gpu_profile``, which does this itself."""
    try:
        yield
    except UserError as error:
        raise without_retry(error) from None


_retry_forbidden = False


def without_retry(error: UserError, kind: type[FinetuneError] = FinetuneError) -> FinetuneError:
    """Convert a UserError to the exception that Metaflow prints; the task is not retried."""
    forbid_retry()
    logs.show_traceback(error)
    return kind(error.problem, error.advice)


def forbid_retry() -> None:
    """Make this task exit with the status that is not retried, if it fails."""
    global _retry_forbidden
    _retry_forbidden = True


_in_main = False


CommandLine = Callable[[str, Sequence[str]], str]
"""Maps (flow file, arguments) to the command that a user would type."""


def file_command(script: str, arguments: Sequence[str]) -> str:
    """Return the command of a flow that is run by its file."""
    return shlex.join(["python", script, *arguments])


def resume_command(script: str, arguments: Sequence[str], run_id: str, command_line: CommandLine) -> str:
    """Return the command that resumes a run started with ``arguments``.

    Metaflow takes parameters and configs from the run; the options that name the target must be repeated.
    """
    tokens = iter(arguments)
    target_options = []
    for token in tokens:
        name, _, value = token.partition("=")
        if name in _TARGET_OPTIONS:
            target_options += [token] if value else [token, next(tokens, "")]
    return command_line(script, [*target_options, "resume", _ORIGIN, run_id])


_after_error_message: list[Callable[[], None]] = []


def after_error_message(do: Callable[[], None]) -> None:
    """Call ``do`` after Metaflow printed why the task failed; immediately in a flow without :func:`main`."""
    if _in_main:
        _after_error_message.append(do)
    else:
        do()


def main(flow: type[Any], command_line: CommandLine | None = None) -> None:
    """Run a flow's command line, like ``flow()``.

    In addition: sets a user name if the machine has none, keeps the run alive when its shell ends, ends
    remote jobs together with the run, shows training progress in one line on a terminal, and prints the cause
    of a failed run last. Metaflow always exits with 1 after an error; this exits with
    :data:`USER_ERROR_STATUS` if nothing was started, and a task that raised a UserError exits with the status
    that keeps Metaflow's local scheduler from retrying it.

    ``command_line`` formats the command of the flow for its help and for suggestions; by default it runs the
    flow's file.
    """
    global _in_main
    _in_main = True
    ensure_user()
    MetaflowInternalError.headline = "The run failed"
    launches = bool({"run", "resume"} & set(sys.argv[1:]))
    close_line, cause = None, None
    if launches:
        outlive_shell()
        cause = collect_cause([kind.headline for kind in (FinetuneError, TrainingFailed, NotFit)])
        if sys.stdout.isatty():
            close_line = renew_steps()
    try:
        logs.setup()
        sys.argv[1:] = _separate_origin(sys.argv[1:])
        limit_datastore()
        if launches:
            check_local_datastore()
    except UserError as error:
        logs.show_traceback(error)
        print_line(error.problem)
        print_line(error.advice)
        raise SystemExit(USER_ERROR_STATUS) from None
    printed_errors = _configure_command_line(flow, command_line and _program_name(command_line), cause)
    interrupts.raise_again()
    if launches:
        forward_signals_to_jobs()
    failed = False
    try:
        flow()
    except SystemExit as ended:
        failed = bool(ended.code)
        if ended.code == 1 and _retry_forbidden and _would_be_retried():
            raise SystemExit(METAFLOW_EXIT_DISALLOW_RETRY) from None
        started = system_context.run_id or system_context.is_task or system_context.is_trampoline
        if ended.code == 1 and printed_errors and not started:
            raise SystemExit(USER_ERROR_STATUS) from None
        raise
    finally:
        if close_line is not None:
            close_line()
        sys.stderr.flush()
        if launches and was_interrupted() and system_context.run_id:
            suggestion = resume_command(
                sys.argv[0], sys.argv[1:], str(system_context.run_id), command_line or file_command
            )
            print_line(f"Resume the run: {suggestion}")
        elif cause is not None and failed:
            for line in cause.lines:
                print_line(line)
        for do in _after_error_message:
            do()


def _separate_origin(arguments: Sequence[str]) -> list[str]:
    """Write ``--origin-run-id=RUN`` as two arguments.

    Metaflow takes the run whose configs it reads from the argument after ``--origin-run-id``; if no argument
    equals that, it takes the newest run.
    """
    if arguments and arguments[-1] == _ORIGIN:
        raise UserError(f"{_ORIGIN} has no value.", "Name a run, or leave it out to resume the newest.")
    separated: list[str] = []
    for argument in arguments:
        name, is_set, value = argument.partition("=")
        separated += [name, value] if name == _ORIGIN and is_set else [argument]
    return separated


def _program_name(command_line: CommandLine) -> str:
    """Return the program's name in Metaflow's messages, to which they append the flow's command."""
    run_command = command_line(sys.argv[0], ["run"])
    if "run" in sys.argv[1:] and run_command.endswith(" run"):
        return run_command.removesuffix(" run")
    return command_line(sys.argv[0], ())


def _configure_command_line(
    flow: type[Any], name: str | None, cause: FailureCause | None
) -> list[MetaflowException]:
    """Configure Metaflow's help and its output of errors; return the list that receives these errors.

    ``name`` replaces the flow's file in the help. ``cause``: once it has lines, Metaflow's internal errors,
    such as the scheduler's about the terminal step, are collected but not printed.
    """
    with flow_context(flow):  # the options depend on the flow
        from metaflow import cli

    mask_errors()
    if name is not None:
        cli.start.main = functools.partial(cli.start.main, prog_name=name)
    printed_errors: list[MetaflowException] = []
    print_exception = cli.print_metaflow_exception

    def show(error: MetaflowException) -> None:
        printed_errors.append(error)
        if not (isinstance(error, MetaflowInternalError) and cause is not None and cause.lines):
            print_exception(error)
        if error.headline.startswith(_MICROMAMBA):
            print_line("Error: Metaflow's --environment could not be created, for the reason above.")
            print_line("Check the network and the package names, or leave --environment out.")

    print_unknown_exception = cli.print_unknown_exception

    def show_unknown(error: Exception) -> None:
        if not is_disk_full(error):
            print_unknown_exception(error)
            return
        place = "the datastore or a temporary file" if _output_is_writable() else "the output"
        show(without_retry(no_space_error(error, place, _NO_SPACE_ADVICE)))

    cli.print_metaflow_exception, cli.print_unknown_exception = show, show_unknown
    cli.get_latest_run_id, cli.TaskDataStoreSet = origin_run, stored_tasks
    return printed_errors


def origin_run(echo: Callable[..., None], flow_name: str) -> str:
    """Return the id of the newest run, which ``resume`` continues by default."""
    run_id: str | None = get_latest_run_id(echo, flow_name)
    if run_id is None:
        raise FinetuneError(
            "There is no run to resume: Metaflow finds no earlier run of this flow.",
            f"Name a run: resume {_ORIGIN} RUN",
        )
    return run_id


def stored_tasks(flow_datastore: Any, run_id: str, **options: Any) -> list[Any]:
    """Return the stored tasks of a run's first step, for ``resume``. Without any, Metaflow would fail."""
    tasks = list(TaskDataStoreSet(flow_datastore, run_id, **options))
    if not tasks:
        raise FinetuneError(
            f"Run {run_id} cannot be resumed: its parameters are not in the datastore.",
            f"Name another run: resume {_ORIGIN} RUN",
        )
    return tasks


def _output_is_writable() -> bool:
    """Flush standard output; if that fails, redirect it to nowhere, as Python would fail again at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return False
    return True


def _would_be_retried() -> bool:
    # Called after Metaflow's command has ended, when there is no click context any more.
    task = system_context.phase == ExecutionPhase.TASK
    return task and (system_context.retry_count or 0) < (system_context.max_user_code_retries or 0)


def end_step(error: UserError) -> NoReturn:
    """End the process that waits for a remote step: print the error, and keep Metaflow from retrying it."""
    print_line(f"{FinetuneError.headline}:\n{error.problem}\n{error.advice}")
    raise SystemExit(METAFLOW_EXIT_DISALLOW_RETRY) from None


def print_line(text: str) -> None:
    """Print one line to standard error; standard output is reserved for the output of commands."""
    print(text, file=sys.stderr, flush=True)
