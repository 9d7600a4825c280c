"""Run a user's own training script in all processes of a step: ``current.gpu_profile.torchrun("train.py")``.

The launchers' gang runs it: one torchrun agent per node, nodes authenticate each other with a secret, and any
failure ends all nodes within seconds with the same named cause. In a ``num_parallel`` step every task is one
node.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from metaflow import current

from decorators import _metaflow
from decorators.storage import datastore
from estimator.errors import UserError
from estimator.hardware import local_machine
from estimator.plan import Plan
from launchers.cluster.endpoint import NodeAddress, Secret, choose_ports
from launchers.gang.node import run_node
from launchers.gang.script_job import Processes, ScriptJob, values_of
from launchers.report.telemetry import Event
from launchers.workdir import work_folder

HANG_TIMEOUT_S = 1800.0
JOIN_TIMEOUT_S = 300.0  # of one node for the others
_POLL_S = 0.5
_calls = 0  # of this process: a step may run several scripts


def torchrun(
    plan: Plan | None,
    on_event: Callable[[Event], None],
    script: str | Path | Callable[..., Any],
    arguments: Sequence[Any] = (),
    keywords: Mapping[str, Any] | None = None,
    *,
    processes_per_node: int | None = None,
    hang_timeout_s: float = HANG_TIMEOUT_S,
) -> None:
    """Run a script or a function in every process of this step's nodes: see ``Profile.torchrun``."""
    global _calls
    _calls += 1
    where = current.parallel if getattr(current, "parallel", None) else None
    node, nodes = (where.node_index, where.num_nodes) if where is not None else (0, 1)
    key = f"runs/{current.run_id}/{current.step_name}/{current.retry_count}/rendezvous-{_calls}.json"
    with work_folder(str(current.run_id), f"{current.step_name}-script", f"{current.task_id}") as work:
        job = _job(plan, script, arguments, keywords or {}, work, nodes, processes_per_node, hang_timeout_s)
        ports, secret = _rendezvous(key, node, nodes)
        address = NodeAddress(
            node=node,
            nodes=nodes,
            main_host=where.main_ip if where is not None else "127.0.0.1",
            ports=ports,
            secret=secret,
            run=f"{current.run_id}/{current.step_name}/{current.retry_count}/{_calls}",
            join_timeout_s=JOIN_TIMEOUT_S,
        )
        first_rank = node * job.layout.processes_per_node
        with _following(job.logs_dir, first_rank):
            run_node(job, address, on_event=on_event)
    if node == 0 and nodes > 1:
        datastore().delete([key])


def _job(
    plan: Plan | None,
    script: str | Path | Callable[..., Any],
    arguments: Sequence[Any],
    keywords: Mapping[str, Any],
    work: Path,
    nodes: int,
    processes_per_node: int | None,
    hang_timeout_s: float,
) -> ScriptJob:
    machine = local_machine.here()
    processes = processes_per_node or (
        plan.layout.processes_per_node if plan is not None else len(machine.gpus)
    )
    if plan is not None and plan.layout.nodes != nodes:
        raise UserError(
            f"The plan is for {plan.layout.nodes} nodes, and this step runs on {nodes}.",
            f"Start the step with num_parallel={plan.layout.nodes}, or plan with nodes={nodes}.",
        )
    function = call = None
    if callable(script):
        file, function = _importable(script)
        call = work / "call.pickle"
        call.write_bytes(values_of(*arguments, **keywords))
        arguments = ()
    else:
        file = Path(script).resolve()
        if not file.is_file():
            raise UserError(f"There is no script {script}.", f"The step runs in {Path.cwd()}.")
    return ScriptJob(
        script=file,
        arguments=tuple(str(argument) for argument in arguments),
        function=function,
        call=call,
        work_dir=work / "node",
        layout=Processes(
            nodes=nodes, processes_per_node=max(processes, 1), device="cuda" if machine.gpus else "cpu"
        ),
        cores=machine.cpu_cores,
        hang_timeout_s=hang_timeout_s,
        gpu_type=machine.gpus[0][0] if machine.gpus else None,
    )


def _importable(function: Callable[..., Any]) -> tuple[Path, str]:
    """Return the file and name by which other processes import a function. Raises UserError."""
    name = getattr(function, "__qualname__", "")
    file = inspect.getsourcefile(function) if inspect.isfunction(function) else None
    if file is None or not name.isidentifier():
        raise UserError(
            f"{name or function!r} cannot be run by other processes.",
            "Give torchrun a function at the top level of a file, or the path of a script.",
        )
    return Path(file).resolve(), name


def _rendezvous(key: str, node: int, nodes: int) -> tuple[tuple[int, ...], Secret]:
    """Agree on ports and secret: node 0 writes them to the run's datastore, the other nodes wait for them."""
    if nodes == 1:
        return (), Secret("")
    store = datastore()
    if node == 0:
        ports, secret = choose_ports(local=not _metaflow.in_container()), Secret.make()
        store.put_bytes(key, json.dumps({"ports": ports, "secret": secret.text}).encode())
        return ports, secret
    deadline = time.monotonic() + JOIN_TIMEOUT_S
    while True:
        with contextlib.suppress(FileNotFoundError):
            values = json.loads(store.get_bytes(key))
            return tuple(values["ports"]), Secret(values["secret"])
        if time.monotonic() > deadline:
            raise UserError(
                f"Node 0 did not start its script within {JOIN_TIMEOUT_S:g} s.",
                "Look at the log of the step's first task.",
            )
        time.sleep(_POLL_S)


@contextlib.contextmanager
def _following(logs: Path, rank: int) -> Iterator[None]:
    """Copy the output of this node's first rank to the task's output while it runs."""
    ended = threading.Event()
    streams = ((logs / f"rank-{rank:05d}.out", sys.stdout), (logs / f"rank-{rank:05d}.err", sys.stderr))
    thread = threading.Thread(target=_copy, args=(streams, ended), name="script-output", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(10)


def _copy(streams: Sequence[tuple[Path, TextIO]], ended: threading.Event) -> None:
    offsets = [0] * len(streams)
    while True:
        last = ended.is_set()
        for number, (path, output) in enumerate(streams):
            with contextlib.suppress(OSError), path.open("rb") as file:  # not there yet
                file.seek(offsets[number])
                if text := file.read():
                    offsets[number] += len(text)
                    output.write(text.decode(errors="replace"))
                    output.flush()
        if last:
            return
        ended.wait(_POLL_S)
