"""A process that makes shards, and its parent that takes each as soon as it is there.

``python -m MODULE request.json`` in a process of its own: its memory is given back when it ends, and code of
the user's in it can harm nothing else. What the process has finished before it is killed stays.
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
from launchers.cluster.processes import started, tail
from launchers.rejection.answers import shard_name
from launchers.request_process import PROBLEM

POLL_S = 0.2  # between two looks for finished shards
SIGN_S = 10.0  # from one line that says how far it is to the next, while no shard is finished


def make_shards(
    module: str,
    request: Path,
    folder: Path,
    shards: Sequence[int],
    *,
    what: str,
    device: str,
    limit_s: float,
    on_shard: Callable[[int, Path], None],
    python: str | None = None,
) -> None:
    """Run ``module`` until these shards are in ``folder``; those that are there are kept.

    Parameters
    ----------
    request:
        What the process is told; its log and its problem lie beside this file.
    what:
        Is done, in words, for whoever waits: "drawing answers".
    device:
        "cpu": the process is to see no GPU.
    limit_s:
        Seconds after which a process that has finished no shard counts as hung.
    on_shard:
        Called with the number and the file of each shard that was not there before.
    python:
        That runs the module; None: this one.

    Raises
    ------
    UserError
        Where the process has said what the user can mend, or hangs.
    RuntimeError
        Where it has ended otherwise: the same call goes on with the shards that are missing.
    """
    missing = [shard for shard in shards if not (folder / shard_name(shard)).is_file()]
    if not missing:
        return
    log, problem = request.with_suffix(".log"), request.with_name(PROBLEM)
    problem.unlink(missing_ok=True)
    status = None
    began = heard = told = time.monotonic()
    with started(module, request, log, on_cpu=device == "cpu", python=python) as process:
        while status is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = process.wait(timeout=POLL_S)
            for shard in [shard for shard in missing if (folder / shard_name(shard)).is_file()]:
                on_shard(shard, folder / shard_name(shard))
                missing.remove(shard)
                heard = told = time.monotonic()
            now = time.monotonic()
            if status is None and now - told >= SIGN_S:
                done = f"{len(shards) - len(missing)} of {len(shards)} shards"
                print(f"{what}: {done}, after {format_clock(now - began)}", flush=True)
                told = now
            if status is None and now - heard > limit_s:
                raise UserError(
                    f"{module} has finished no shard for {limit_s:g} s; "
                    f"{len(missing)} of {len(shards)} are left.",
                    "Raise resources.hang_timeout_s if it is that slow here.",
                )
    if status == 0 and not missing:
        return
    if problem.is_file():
        raise UserError(**json.loads(problem.read_text()))
    how = f"was ended by {signal.Signals(-status).name} ({-status})" if status < 0 else "has failed"
    raise RuntimeError(f"{module} {how}, {len(missing)} of {len(shards)} shards are missing. {tail(log, 30)}")
