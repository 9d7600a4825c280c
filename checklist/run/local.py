"""Nodes as processes: all nodes of a run on this machine, or the node of a flow's task."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from checklist import measurements
from checklist.checks.gpu import gpus_probe
from checklist.measurements import Measurements
from checklist.options import Options, build
from checklist.probing.context import PARENT
from checklist.run.node_agent import run
from checklist.run.phases import limits_of
from checklist.run.rendezvous import Rendezvous, of_node
from estimator.errors import UserError
from launchers.cluster.endpoint import Secret
from launchers.cluster.processes import die_with_parent

_ROOT = Path(__file__).resolve().parents[2]
_NODE = "CHECKLIST_LOCAL_NODE"  # node of a process, for inspection by users
_END_S = 10.0  # time for the other nodes to end by themselves after node 0
_LOOK_S = 0.5  # between polls of the results so far
_SO_FAR = "so-far.json"  # measurements so far, in the work folder of node 0's process
_LAST_S = 60.0  # time for a node's process to start and end, in addition to the run's limits


def run_local(options: Options, *, directory: Path | None = None) -> Measurements:
    """Run ``options.nodes`` nodes on this machine. Raises UserError where it has too few GPUs for them."""
    options, shares = split_gpus(options)
    nodes, processes = options.nodes, options.gpus_per_node or 1
    secret, port = Secret.make(), 20_000 + secrets.randbelow(10_000)
    started = []
    try:
        for node in range(1, nodes):
            rendezvous = _rendezvous(node, nodes, processes, port, secret)
            started.append(_start(options, rendezvous, shares[node], directory))
        if shares[0]:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(shares[0])
        return run(options, _rendezvous(0, nodes, processes, port, secret), directory=directory)
    finally:
        for process in started:
            try:
                process.wait(timeout=_END_S)
            except subprocess.TimeoutExpired:  # noqa: PERF203 - each has its own
                process.kill()  # its workers end with it
                process.wait(timeout=_END_S)


def split_gpus(options: Options) -> tuple[Options, list[tuple[str, ...]]]:
    """Return the options for nodes of this machine, and the UUIDs of each node's GPUs.

    Sets the number of processes and the device. Raises UserError if there are too few GPUs, or if the options
    need several hosts.
    """
    if options.reference_node is not None:
        raise UserError(
            f"--reference-node {options.reference_node} needs several hosts; all nodes of this run are "
            "on this machine.",
            "Add --reference-settings RESULT.json, or run on a cluster.",
        )
    visible = gpus_probe.list_gpus().uuids if options.device != "cpu" else ()
    share = len(visible) // options.nodes
    if visible and options.device == "auto" and not share:
        options = options.model_copy(update={"device": "cpu"})  # one GPU cannot be two nodes
    processes = options.processes_per_node(share if options.device != "cpu" else 0)
    on_gpus = options.device != "cpu" and bool(visible)
    shares = [visible[node * processes : (node + 1) * processes] for node in range(options.nodes)]
    device = "cuda" if on_gpus else "cpu"
    decided = options.model_copy(update={"gpus_per_node": processes, "device": device})
    return decided, shares if on_gpus else [()] * options.nodes


def run_node(
    options: Options,
    rendezvous: Rendezvous,
    uuids: tuple[str, ...],
    directory: Path,
    on_measured: Callable[[Measurements], None] = lambda _: None,
) -> Measurements:
    """Run one node in a separate process, which the waiting process outlives.

    ``on_measured`` is called on node 0 with the measurements so far, within seconds. Raises UserError if the
    process failed, was killed or exceeded its time limit.
    """
    result_file = directory / "answer.json"
    limits = limits_of(options)
    limit = limits.rendezvous + limits.run + _LAST_S
    process = _start(options, rendezvous, uuids, directory, result_file)
    try:
        status = _wait(process, limit, directory / _SO_FAR, on_measured)
    finally:
        _end(process)
    if status is None:
        raise UserError(
            f"The checklist's process of node {rendezvous.node} did not end within {limit:.0f} s.",
            "Check that node: a process hangs there outside of any collective.",
        )
    if not result_file.exists():
        ending = f"was ended by signal {-status}" if status < 0 else f"has failed with status {status}"
        raise UserError(
            f"The checklist's process {ending}.",
            "Check the node's log; signal 9 is often its memory limit.",
        )
    outcome = json.loads(result_file.read_text())
    if "problem" in outcome:
        raise UserError(outcome["problem"], outcome["advice"])
    return measurements.record(Measurements, outcome["measurements"])


def _wait(
    process: subprocess.Popen[bytes], limit_s: float, file: Path, on_measured: Callable[[Measurements], None]
) -> int | None:
    """Wait for the process; return its exit status, or None at the time limit. Passes on new content of
    the file.
    """
    deadline, status = time.monotonic() + limit_s, None
    while time.monotonic() < deadline:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(timeout=_LOOK_S)
        changed = file.stat().st_mtime_ns if file.exists() else None
        if changed != status:
            status = changed
            on_measured(measurements.from_json(file.read_text()))
    return None


def _rendezvous(node: int, nodes: int, processes: int, port: int, secret: Secret) -> Rendezvous:
    return of_node(
        node=node,
        nodes=nodes,
        processes=processes,
        host="127.0.0.1",
        port=port,
        secret=secret,
        simulated=True,
    )


def _start(
    options: Options,
    rendezvous: Rendezvous,
    uuids: tuple[str, ...],
    directory: Path | None,
    result_file: Path | None = None,
) -> subprocess.Popen[bytes]:
    job = {
        "rendezvous": rendezvous.to_dict(),
        "options": options.model_dump(mode="json", exclude={"thresholds"}),  # which no node needs
        "directory": str(directory) if directory else None,
        "answer": str(result_file) if result_file else None,
    }
    environment = {**os.environ, _NODE: str(rendezvous.node), PARENT: str(os.getpid())}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))
    if uuids:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(uuids)
    process = subprocess.Popen(
        [sys.executable, "-m", "checklist.run.local"],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=None if result_file else subprocess.DEVNULL,
    )
    # Through its standard input: the run's secret is in it, and command lines and environments can be read
    if process.stdin is not None:
        with (
            contextlib.suppress(BrokenPipeError),
            process.stdin,
        ):  # if it has ended already, its status is used
            process.stdin.write(json.dumps(job).encode())
    return process


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process: interrupt it so that it cleans up, then kill it; its workers end with it."""
    process.terminate()
    try:
        process.wait(timeout=_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(timeout=_END_S)


def main() -> int:
    """Run one node; write its result to the file named by the job, if any."""
    die_with_parent(int(os.environ[PARENT]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the parent process
    job = json.loads(sys.stdin.buffer.read())
    outcome: dict[str, Any]
    result_file = Path(job["answer"]) if job["answer"] else None

    def on_measured(found: Measurements) -> None:
        if result_file is not None:
            _write(result_file.with_name(_SO_FAR), measurements.to_json(found))

    try:
        final = run(
            build(Options, job["options"]),
            Rendezvous.from_dict(job["rendezvous"]),
            directory=Path(job["directory"]) if job["directory"] else None,
            on_measured=on_measured,
        )
        outcome = {"measurements": measurements.to_dict(final)}
    except UserError as error:
        outcome = {"problem": error.problem, "advice": error.advice}
    if result_file is not None:
        _write(result_file, json.dumps(outcome))
    return 2 if "problem" in outcome else 0  # otherwise node 0 reports


def _write(file: Path, text: str) -> None:
    """Write a file so that a reader sees all of it or none."""
    part = file.with_name(f"{file.name}.part")
    part.write_text(text)
    part.replace(file)


if __name__ == "__main__":
    sys.exit(main())
