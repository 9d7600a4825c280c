"""``python -m launchers``: a training run on the nodes of a scheduler's job, once on each, without Metaflow.

    srun --ntasks-per-node=1 python -m launchers --settings run.yaml --output /shared/runs/mine

Exit status: 0 the model is there; 1 training has failed, or a node was lost; 2 a mistake to be mended first;
75 ended by SIGUSR1, SIGTERM or Ctrl-C. After 1 and 75 the same command goes on from the newest checkpoint.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from estimator import logs
from estimator.errors import MISTAKE, UserError
from estimator.names import check_options
from launchers import settings
from launchers.cluster.allocation import Allocation, node_address
from launchers.cluster.hangup import outlive_shell
from launchers.cluster.processes import outlive_parent
from launchers.gang.failures import GangFailed, NodeLeft
from launchers.scheduler.meeting import ElsewhereError
from launchers.scheduler.run import SchedulerRun, run
from launchers.spelling import SET
from launchers.workdir import work_folder

FAILED = 1
STOPPED = 75  # EX_TEMPFAIL of sysexits.h: try again
GOES_ON = "The same command goes on from the newest checkpoint."
SIGNALS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def launch(
    settings_file: Annotated[
        Path | None, typer.Option("--settings", help="A YAML file of settings (docs/settings.md).")
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", help="Any setting by its dotted name, as often as needed: optimizer.lr=2e-5."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(help="Folder that all nodes share; gets the model. [default: the setting output_dir]"),
    ] = None,
    cache: Annotated[
        Path | None,
        typer.Option(help="Shared folder where fetched models are kept for other runs too."),
    ] = None,
    prepare_timeout: Annotated[
        float, typer.Option(help="Seconds that the other nodes wait for node 0's weights and data.")
    ] = 7200.0,
    calibration: Annotated[
        bool, typer.Option(help="Let what finished runs have measured correct the plan.")
    ] = True,
) -> None:
    """Train on the nodes that Slurm, PBS, mpiexec or torchrun runs this on: once on each node.

    Exit status: 0 the model is there; 1 training failed or a node was lost; 2 a mistake to be mended first;
    75 ended by a signal. After 1 and 75 the same command goes on from the newest checkpoint.
    """
    for number in SIGNALS:
        signal.signal(number, _stop)
    outlive_shell()
    status = 0
    try:
        place = node_address()
        if place.scheduler == "none":
            outlive_parent()
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
        status = MISTAKE
    except SystemExit as stopped:
        print(f"stopped by {stopped.code}\n{GOES_ON}", file=sys.stderr, flush=True)
        status = STOPPED
    raise typer.Exit(status)


def _run(request: SchedulerRun, place: Allocation) -> int:
    """Train as this node of the run and return the exit status; node 0 alone shows a failure whole."""
    try:
        with (
            work_folder(place.job or "job", f"node{place.node}", place.attempt) as work,
            logs.recording(request.log_file(place)),
        ):
            run(request, place, work)
    except ElsewhereError as error:
        print(f"node {place.node}: ended, as another node says: {error.problem}", file=sys.stderr)
        return MISTAKE
    except NodeLeft as error:
        print(f"stopped: {error}\n{GOES_ON}", file=sys.stderr, flush=True)
        return STOPPED
    except GangFailed as error:
        text = str(error) if place.node == 0 else str(error).partition("\n")[0]
        print(f"Training failed:\n{text}", file=sys.stderr, flush=True)
        return FAILED
    return 0


def _settings(file: Path | None, overrides: Sequence[str]) -> settings.Settings:
    if file is None:
        return settings.build({}, overrides)
    try:
        text = file.read_text()
    except OSError as error:
        raise UserError(f"--settings {file} can't be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise UserError(f"--settings {file} is not text in UTF-8.") from None
    return settings.build(settings.parse_yaml(text, file.parent), overrides)


def _check_options(words: Sequence[str]) -> None:
    """Raise UserError for a setting that is given as if it were an option of its own."""
    check_options(words, (), SET)
    for name in (word.partition("=")[0] for word in words):
        plain = name.removeprefix("--").replace("-", "_")
        meant = [setting for setting in settings.dotted_names() if plain in _spellings(setting)]
        if name.startswith("--") and meant:
            raise UserError(f"There is no {name}.", f"Did you mean --set {meant[0]}=...?")


def _spellings(setting: str) -> tuple[str, ...]:
    return setting, setting.replace(".", "_"), setting.rpartition(".")[2]


def main() -> None:
    """``python -m launchers``."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # a log is no terminal
    try:
        logs.setup()
        _check_options(sys.argv[1:])
    except UserError as error:
        logs.show_traceback(error)
        print(error, file=sys.stderr)
        raise SystemExit(MISTAKE) from None
    app()


def _stop(number: int, _: FrameType | None) -> None:
    """End in order: the run unwinds, its processes are ended, what is stored stays."""
    for other in SIGNALS:
        signal.signal(other, signal.SIG_IGN)
    raise SystemExit(signal.Signals(number).name)


if __name__ == "__main__":
    main()
