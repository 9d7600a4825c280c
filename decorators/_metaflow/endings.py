"""End of a run that cannot continue: a clear message, and no useless retry."""

from __future__ import annotations

import functools
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from metaflow.exception import METAFLOW_EXIT_DISALLOW_RETRY, MetaflowException, MetaflowInternalError
from metaflow.parameters import flow_context
from metaflow.system_context import ExecutionPhase, system_context

from decorators._metaflow.datastores import limit_datastore
from decorators._metaflow.signals import end_with_jobs, was_interrupted
from decorators._metaflow.terminal import renew_steps
from decorators._metaflow.users import ensure_user
from estimator import logs
from estimator.errors import MISTAKE, UserError
from launchers.cluster.hangup import outlive_shell

_WHERE = ("--with", "--datastore", "--datastore-root", "--metadata", "--environment")


class FinetuneError(MetaflowException):  # type: ignore[misc]
    """A user's mistake as Metaflow shows it: a headline and lines of text, no traceback."""

    headline = "Error"

    def __init__(self, problem: str, advice: str = "") -> None:
        # Metaflow takes asterisks for emphasis and drops them.
        text = f"{problem}\n{advice}" if advice else problem
        super().__init__(text.replace("*", "\N{ASTERISK OPERATOR}"))
        self.problem = problem
        self.advice = advice

    def __reduce__(self) -> tuple[type[FinetuneError], tuple[str, str]]:
        return type(self), (self.problem, self.advice)


class TrainingFailed(FinetuneError):  # noqa: N818 - it says what has happened
    """A gang's failure: its text holds the failing rank's own traceback, and Metaflow's adds nothing."""

    headline = "Training failed"


class NotFit(FinetuneError):  # noqa: N818 - it says what was found
    """The checklist's verdict, where it is one that training should not begin with."""

    headline = "The checklist says"


@contextmanager
def user_errors() -> Iterator[None]:
    """Turn a UserError into its clean lines; for steps without ``@gpu_profile``, which does it itself."""
    try:
        yield
    except UserError as error:
        raise final(error) from None


_ended_by_user_error = False


def final(error: UserError, kind: type[FinetuneError] = FinetuneError) -> FinetuneError:
    """A UserError as Metaflow shows it, that ends the task for good: a retry would meet it again."""
    global _ended_by_user_error
    _ended_by_user_error = True
    logs.show_traceback(error)
    return kind(error.problem, error.advice)


_in_main = False


CommandLine = Callable[[str, Sequence[str]], str]
"""From a flow's file and its words to the command that a user would type."""


def by_file(script: str, words: Sequence[str]) -> str:
    """The command of a flow that is run by its file."""
    return shlex.join(["python", script, *words])


def resume_command(script: str, words: Sequence[str], run_id: str, command_line: CommandLine) -> str:
    """The command that continues with a run that these words of a flow have started.

    Metaflow takes parameters and configs from the run; where it is to run must be said again.
    """
    given = iter(words)
    where = []
    for word in given:
        name, _, value = word.partition("=")
        if name in _WHERE:
            where += [word] if value else [word, next(given, "")]
    return command_line(script, [*where, "resume", "--origin-run-id", run_id])


_after_last_words: list[Callable[[], None]] = []


def after_last_words(do: Callable[[], None]) -> None:
    """Do something once Metaflow has said why the task has failed; at once in a flow without :func:`main`."""
    if _in_main:
        _after_last_words.append(do)
    else:
        do()


def main(flow: type[Any], command_line: CommandLine | None = None) -> None:
    """Run a flow's command line, as ``flow()`` does.

    Gives Metaflow a user's name where the machine has none, lets a run outlive its shell, ends its remote
    jobs with it, and shows the steps of a training in one line on a terminal. Metaflow ends with 1 whatever
    has happened; this ends with :data:`MISTAKE` where nothing started, and a task that met a UserError with
    the status that tells Metaflow's local scheduler not to retry it.

    ``command_line`` says how the flow is called, in its help and where a command is suggested; by default by
    its file.
    """
    global _in_main
    _in_main = True
    ensure_user()
    MetaflowInternalError.headline = "The run has failed"
    launches = bool({"run", "resume"} & set(sys.argv[1:]))
    close_line = None
    if launches:
        outlive_shell()
        end_with_jobs()
        if sys.stdout.isatty():
            close_line = renew_steps()
    try:
        logs.setup()
        limit_datastore()
    except UserError as error:
        logs.show_traceback(error)
        say(error.problem)
        say(error.advice)
        raise SystemExit(MISTAKE) from None
    shown = _enter_command_line(flow, command_line and command_line(sys.argv[0], ()))
    try:
        flow()
    except SystemExit as ended:
        if ended.code == 1 and _ended_by_user_error and _would_be_retried():
            raise SystemExit(METAFLOW_EXIT_DISALLOW_RETRY) from None
        began = system_context.run_id or system_context.is_task or system_context.is_trampoline
        if ended.code == 1 and shown and not began:
            raise SystemExit(MISTAKE) from None
        raise
    finally:
        if close_line is not None:
            close_line()
        sys.stderr.flush()
        if launches and was_interrupted() and system_context.run_id:
            again = resume_command(
                sys.argv[0], sys.argv[1:], str(system_context.run_id), command_line or by_file
            )
            say(f"To go on where it stood: {again}")
        for do in _after_last_words:
            do()


def _enter_command_line(flow: type[Any], name: str | None) -> list[MetaflowException]:
    """Let Metaflow's help call the flow's command ``name``, if it has one, instead of by its file.

    Returns a list to which Metaflow will add what it shows as lines; a bug has a traceback instead.
    """
    with flow_context(flow):  # which options there are depends on the flow
        from metaflow import cli

    if name is not None:
        cli.start.main = functools.partial(cli.start.main, prog_name=name)
    shown: list[MetaflowException] = []
    own = cli.print_metaflow_exception

    def show(error: MetaflowException) -> None:
        shown.append(error)
        own(error)

    cli.print_metaflow_exception = show
    return shown


def _would_be_retried() -> bool:
    # Asked after Metaflow's command has ended, when no click context is left.
    task = system_context.phase == ExecutionPhase.TASK
    return task and (system_context.retry_count or 0) < (system_context.max_user_code_retries or 0)


def say(text: str) -> None:
    """One line for the person at the terminal; never on standard output, which commands may fill."""
    print(text, file=sys.stderr, flush=True)
