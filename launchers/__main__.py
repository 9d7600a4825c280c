"""``python -m launchers``: training on the nodes of a scheduler's job, without Metaflow.

Started once on each node:

    srun --ntasks-per-node=1 python -m launchers --settings run.yaml --output /shared/runs/mine

Exit status: 0 the model is written; 1 training failed or a node was lost; 2 a user error; 75 ended by
SIGUSR1, SIGTERM or Ctrl-C. After 1 and 75 the same command resumes from the newest checkpoint.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from estimator import logs
from estimator.errors import USER_ERROR_STATUS, UserError, impossible_paths_refused
from estimator.terminal import ended_by_closed_pipe, print
from launchers import settings
from launchers.base.workdir import work_folder
from launchers.cluster.allocation import Allocation, node_address
from launchers.cluster.hangup import outlive_shell
from launchers.cluster.processes import outlive_parent
from launchers.gang.failures import GangFailed, NodeLeft
from launchers.scheduler.rendezvous import RemoteUserError
from launchers.scheduler.run import SchedulerRun, run
from launchers.settings.options import translate

FAILED = 1
STOPPED = 75  # EX_TEMPFAIL in sysexits.h: try again
RESUME_HINT = "Run the same command to resume from the newest checkpoint."
SIGNALS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class _Help(TyperCommand):
    def format_help(self, ctx: Any, formatter: Any) -> None:
        with ended_by_closed_pipe():
            super().format_help(ctx, formatter)


@app.command(cls=_Help)
def launch(
    settings_file: Annotated[
        Path | None, typer.Option("--settings", help="YAML file with settings (docs/settings.md).")
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", help="Set any setting by its dotted name, e.g. optimizer.lr=2e-5; repeatable."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(help="Folder for the model, shared by all nodes. [default: the setting output_dir]"),
    ] = None,
    cache: Annotated[
        Path | None,
        typer.Option(help="Shared folder that caches fetched models for later runs."),
    ] = None,
    prepare_timeout: Annotated[
        float, typer.Option(help="Seconds that the other nodes wait for weights and data from node 0.")
    ] = 7200.0,
    calibration: Annotated[
        bool, typer.Option(help="Correct the plan with the measurements of finished runs.")
    ] = True,
) -> None:
    """Train on the nodes that Slurm, PBS, mpiexec or torchrun starts this command on, once per node.

    Exit status: 0 the model is written; 1 training failed or a node was lost; 2 a user error; 75 ended by a
    signal. After 1 and 75 the same command resumes from the newest checkpoint.

    Every setting is also an option, as in `finetune run`: --lora-rank 16. `finetune settings` lists them.
    """
    for number in SIGNALS:
        signal.signal(number, _stop)
    outlive_shell()
    status = 0
    try:
        place = node_address()
        if place.scheduler == "none":
            outlive_parent()
        with impossible_paths_refused():
            values = _settings(settings_file, overrides or ())
        request = SchedulerRun(
            settings=values,
            output=(output or Path(values.output_dir)).expanduser().absolute(),
            cache=cache.expanduser().absolute() if cache else None,
            prepare_limit_s=prepare_timeout,
            calibrated=calibration,
        )
        status = _run(request, place)
    except UserError as error:
        logs.show_traceback(error)
        print(error, file=sys.stderr)
        status = USER_ERROR_STATUS
    except SystemExit as stopped:
        print(f"stopped by {stopped.code}\n{RESUME_HINT}", file=sys.stderr, flush=True)
        status = STOPPED
    raise typer.Exit(status)


def _run(request: SchedulerRun, place: Allocation) -> int:
    """Train as this node of the run and return the exit status; only node 0 prints a failure in full."""
    try:
        with (
            impossible_paths_refused(),
            work_folder(place.job or "job", f"node{place.node}", place.attempt) as work,
            logs.recording(request.log_file(place)),
        ):
            run(request, place, work)
    except RemoteUserError as error:
        print(f"node {place.node}: ended by another node's error: {error.problem}", file=sys.stderr)
        return USER_ERROR_STATUS
    except NodeLeft as error:
        print(f"stopped: {error}\n{RESUME_HINT}", file=sys.stderr, flush=True)
        return STOPPED
    except GangFailed as error:
        text = str(error) if place.node == 0 else str(error).partition("\n")[0]
        print(f"Training failed:\n{text}", file=sys.stderr, flush=True)
        return FAILED
    return 0


def _settings(file: Path | None, overrides: Sequence[str]) -> settings.Settings:
    """Build the settings from the file and the overrides."""
    chosen = settings.build({} if file is None else settings.read_file(file), overrides)
    settings.check_used(chosen, overrides, model_resolved=False)
    return chosen


def _own_options() -> set[str]:
    """Return the options of this command, besides those of the settings."""
    parameters = typer.main.get_command(app).params
    return {"--help", *(name for option in parameters for name in (*option.opts, *option.secondary_opts))}


def main() -> None:
    """Run ``python -m launchers``."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # output usually goes to a log file
    try:
        logs.setup()
        sys.argv[1:] = translate(sys.argv[1:], (), _own_options())
    except UserError as error:
        logs.show_traceback(error)
        print(error, file=sys.stderr)
        raise SystemExit(USER_ERROR_STATUS) from None
    app()


def _stop(number: int, _: FrameType | None) -> None:
    """Exit through SystemExit, so that the run unwinds and ends its processes; stored data is kept."""
    for stop_signal in SIGNALS:
        signal.signal(stop_signal, signal.SIG_IGN)
    raise SystemExit(signal.Signals(number).name)


if __name__ == "__main__":
    main()
