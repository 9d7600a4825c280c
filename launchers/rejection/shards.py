"""Execution of a process that computes shards, and collection of each finished shard.

``python -m MODULE request.json`` runs in a separate process: its memory is freed when it ends, and user code
in it cannot damage this process. Shards finished before the process is killed are kept.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from estimator.errors import UserError
from estimator.formatting import format_clock
from estimator.terminal import print
from launchers.base.request_process import PROBLEM
from launchers.cluster.processes import started, tail
from launchers.rejection.answers import shard_name

POLL_S = 0.2  # interval of the search for finished shards
PROGRESS_INTERVAL_S = 10.0  # time between two progress lines while no shard is finished


def make_shards(
    module: str,
    request: Path,
    folder: Path,
    shards: Sequence[int],
    *,
    name: str,
    device: str,
    limit_s: float,
    on_shard: Callable[[int, Path], None],
    python: str | None = None,
) -> None:
    """Run ``module`` until these shards are in ``folder``; existing ones are kept.

    Parameters
    ----------
    request:
        Input file of the process; its log and its error file are in the same folder.
    name:
        Description for progress lines, such as "sampling answers".
    device:
        "cpu" hides all GPUs from the process.
    limit_s:
        Seconds without a finished shard after which the process counts as hung.
    on_shard:
        Called with number and file of each new shard.
    python:
        Interpreter of the module; None: this one.

    Raises
    ------
    UserError
        If the process reported a user error, or hangs.
    RuntimeError
        If it ended otherwise; calling it again continues with the missing shards.
    """
    missing = [shard for shard in shards if not (folder / shard_name(shard)).is_file()]
    if not missing:
        return
    log, problem = request.with_suffix(".log"), request.with_name(PROBLEM)
    problem.unlink(missing_ok=True)
    status = None
    started_at = last_shard_at = reported_at = time.monotonic()
    with started(module, request, log, on_cpu=device == "cpu", python=python) as process:
        while status is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = process.wait(timeout=POLL_S)
            for shard in [shard for shard in missing if (folder / shard_name(shard)).is_file()]:
                on_shard(shard, folder / shard_name(shard))
                missing.remove(shard)
                last_shard_at = reported_at = time.monotonic()
            now = time.monotonic()
            if status is None and now - reported_at >= PROGRESS_INTERVAL_S:
                progress = f"{len(shards) - len(missing)} of {len(shards)} shards"
                print(f"{name}: {progress}, after {format_clock(now - started_at)}", flush=True)
                reported_at = now
            if status is None and now - last_shard_at > limit_s:
                raise UserError(
                    f"{module} has finished no shard for {limit_s:g} s; "
                    f"{len(missing)} of {len(shards)} are left.",
                    "Raise resources.hang_timeout_s if it is that slow on this hardware.",
                )
    if status == 0 and not missing:
        return
    if problem.is_file():
        raise UserError(**json.loads(problem.read_text()))
    outcome = f"was ended by {signal.Signals(-status).name} ({-status})" if status < 0 else "has failed"
    raise RuntimeError(
        f"{module} {outcome}, {len(missing)} of {len(shards)} shards are missing. {tail(log, 30)}"
    )
