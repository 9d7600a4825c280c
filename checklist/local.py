"""Nodes on this machine without a launcher: each a process of its own, this one is node 0."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from checklist.measurements import Measurements
from checklist.options import Options
from checklist.probes import gpus
from checklist.probes.worker import PARENT, die_with_parent
from checklist.rendezvous import Rendezvous, of_node
from checklist.supervisor import run
from estimator.errors import UserError

_ROOT = Path(__file__).resolve().parent.parent
_JOB = "CHECKLIST_LOCAL_NODE"
_END_S = 10.0  # for the other nodes to end by themselves after node 0


def run_local(options: Options, *, directory: Path | None = None) -> Measurements:
    """Run ``options.nodes`` nodes on this machine. Raises UserError where it has too few GPUs for them."""
    visible = gpus.look().uuids if options.device != "cpu" else ()
    nodes = options.nodes
    share = len(visible) // nodes
    if visible and options.device == "auto" and not share:
        options = replace(options, device="cpu")  # one GPU can't be two nodes
    processes = options.processes_per_node(share if options.device != "cpu" else 0)
    options = replace(options, gpus_per_node=processes)
    token, port = secrets.token_hex(8), 20_000 + secrets.randbelow(10_000)
    others = []
    try:
        for node in range(1, nodes):
            place = _place(node, nodes, processes, port, token)
            own = visible[node * processes : (node + 1) * processes]
            others.append(_start(options, place, own, directory))
        _take(visible[:processes])
        return run(options, _place(0, nodes, processes, port, token), directory=directory)
    finally:
        for other in others:
            try:
                other.wait(timeout=_END_S)
            except subprocess.TimeoutExpired:  # noqa: PERF203 - each has its own
                other.kill()  # its workers end with it
                other.wait(timeout=_END_S)


def _place(node: int, nodes: int, processes: int, port: int, token: str) -> Rendezvous:
    return of_node(
        node=node, nodes=nodes, processes=processes, host="127.0.0.1", port=port, token=token, simulated=True
    )


def _take(uuids: tuple[str, ...]) -> None:
    if uuids:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(uuids)


def _start(
    options: Options, place: Rendezvous, uuids: tuple[str, ...], directory: Path | None
) -> subprocess.Popen[bytes]:
    job = {
        "rendezvous": place.to_dict(),
        "options": {
            "profile": options.profile,
            "nodes": options.nodes,
            "gpus_per_node": options.gpus_per_node,
            "device": options.device,
            "only": options.only,
            "skip": options.skip,
            "time_limits_s": dict(options.time_limits_s),
            "op_limit_s": options.op_limit_s,
            "seed": options.seed,
        },
        "directory": str(directory) if directory else None,
    }
    environment = {**os.environ, _JOB: json.dumps(job), PARENT: str(os.getpid())}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))
    if uuids:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(uuids)
    return subprocess.Popen(
        [sys.executable, "-m", "checklist.local"],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def main() -> int:
    """One of the other nodes."""
    die_with_parent(int(os.environ[PARENT]))
    job = json.loads(os.environ[_JOB])
    options = Options(**{**job["options"], **{key: tuple(job["options"][key]) for key in ("only", "skip")}})
    try:
        run(
            options,
            Rendezvous.from_dict(job["rendezvous"]),
            directory=Path(job["directory"]) if job["directory"] else None,
        )
    except UserError:
        return 2  # node 0 tells what there is to tell
    return 0


if __name__ == "__main__":
    sys.exit(main())
