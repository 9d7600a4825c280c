"""Process of one rank: ``python -m launchers.run.worker JOB_FILE [--engine MODULE:CLASS]`` trains a job.

Files in the work folder inform the node's task: ``ranks/rank-NNNNN.json`` (the pid) at the start,
``ranks/rank-NNNNN.done`` after successful training, ``errors/rank-NNNNN.json`` after a failure.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import socket
import sys
import time
import traceback
from importlib import import_module
from pathlib import Path

from estimator import logs
from estimator.errors import UserError
from launchers import engines
from launchers.base.workdir import NO_SPACE, file_of_error, is_caused_by_full_disk
from launchers.cluster.numa import bind_to_gpu
from launchers.cluster.processes import PARENT, die_with_parent
from launchers.gang.job import TrainJob
from launchers.gang.rank import RankEnv, write_atomically, write_error
from launchers.gang.script_job import ScriptJob, is_script

_RESERVE_BYTES = 256 * 1024


def main() -> None:
    """Entry point of a rank."""
    die_with_parent(int(os.environ[PARENT]))
    logs.setup()
    parser = argparse.ArgumentParser(prog="launchers.run.worker")
    parser.add_argument("job_file", type=Path)
    parser.add_argument("--engine", help="MODULE:CLASS instead of the job's engine")
    arguments = parser.parse_args()
    env = RankEnv.read()
    work_dir = arguments.job_file.parent
    ranks, errors = work_dir / "ranks", work_dir / "errors"
    errors.mkdir(parents=True, exist_ok=True)
    reserve = errors / f"rank-{env.rank:05d}.reserve"  # freed to write the error on a full disk
    try:
        values = {"pid": os.getpid(), "at": time.time()}
        write_atomically(ranks / f"rank-{env.rank:05d}.json", json.dumps(values))
        _link_logs(work_dir / "logs", env.rank)
        reserve.write_bytes(os.urandom(_RESERVE_BYTES))
        if is_script(arguments.job_file):
            bind_to_gpu(env.local_rank, env.local_world_size)
            ScriptJob.load(arguments.job_file).run()
        else:
            job = TrainJob.load(arguments.job_file)
            if job.plan.layout.device == "cuda":
                bind_to_gpu(env.local_rank, env.local_world_size)
            _engine(arguments.engine, job).train(job)
        (ranks / f"rank-{env.rank:05d}.done").write_text(json.dumps({"at": time.time()}))
    except BaseException as error:  # noqa: BLE001 the process ends after any error
        reserve.unlink(missing_ok=True)
        _fail(work_dir, env.rank, error)
    # Exit without the interpreter's teardown: a crash in a library's destructor would turn a finished rank
    # into a failed one while other ranks still save.
    reserve.unlink(missing_ok=True)
    _exit(0)


def _engine(name: str | None, job: TrainJob) -> engines.Engine:
    """Return the engine named MODULE:CLASS; None: the engine of the plan."""
    if name is None:
        return engines.get(job.plan.engine)
    module, _, attribute = name.partition(":")
    engine: engines.Engine = getattr(import_module(module), attribute)()
    return engine


def _link_logs(logs: Path, rank: int) -> None:
    """Link logs/rank-NNNNN.out and .err to torchrun's log files, whose names are random."""
    for descriptor, suffix in ((1, "out"), (2, "err")):
        target = str(Path(f"/proc/self/fd/{descriptor}").readlink())
        link = logs / f"rank-{rank:05d}.{suffix}"
        if target.startswith(str(logs.resolve())):
            link.unlink(missing_ok=True)
            link.symlink_to(os.path.relpath(target, logs.resolve()))


def _fail(work_dir: Path, rank: int, error: BaseException) -> None:
    """Write the error file of this rank and exit with status 1; explain an error by a full disk."""
    if isinstance(error, SystemExit) and error.code in (0, None):
        error = RuntimeError("the engine called sys.exit() before the end of training")
    traceback.print_exception(error, file=sys.stderr)
    if is_caused_by_full_disk(error, work_dir):
        _remove_unfinished(work_dir / "checkpoints")
        path = file_of_error(error, work_dir)
        problem = f"{NO_SPACE} on {socket.gethostname()} for {path}, written by rank {rank}."
        error = UserError(problem, "Request a larger disk, or free some space there.")
    write_error(work_dir / "errors", rank, error)
    _exit(1)


def _exit(code: int) -> None:
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _remove_unfinished(checkpoints: Path) -> None:
    """Remove checkpoints without any finished part, such as one interrupted by a full disk."""
    for folder in checkpoints.glob("step-*"):
        if not any(folder.glob("rank-*.json")):
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
