"""Run a user's own training script in all processes of a step: ``current.gpu_profile.torchrun("train.py")``.

The launchers' gang runs it: one torchrun agent per node, nodes authenticate each other with a secret, and any
failure ends all nodes within seconds with the same named cause. In a ``num_parallel`` step every task is one
node.
"""

from __future__ import annotations

import codecs
import contextlib
import inspect
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

from metaflow import current

from decorators import _metaflow
from decorators.backends import disruptions
from decorators.storage import datastore
from estimator.errors import UserError
from estimator.hardware import local_machine
from estimator.plan import Plan
from launchers.base.workdir import work_folder
from launchers.cluster.endpoint import NodeAddress, Secret, choose_ports
from launchers.gang.node import run_node
from launchers.gang.script_job import Processes, ScriptJob, values_of
from launchers.report.telemetry import Event

LOCAL_JOIN_S = 300.0  # wait of one node for the others on this machine
CLUSTER_JOIN_S = 1860.0  # as long as the launch waits for pods (Options.pending_timeout), and a minute more
_POLL_S = 0.5
_calls = 0  # of this process: a step may run several scripts


def torchrun(
    plan: Plan | None,
    on_event: Callable[[Event], None],
    checkpoint_dir: Path,
    script: str | Path | Callable[..., Any],
    arguments: Sequence[Any],
    keywords: Mapping[str, Any] | None,
    *,
    processes_per_node: int | None,
    hang_timeout_s: float,
) -> None:
    """Run a script or a function in every process of this step's nodes: see ``Profile.torchrun``."""
    global _calls
    _calls += 1
    parallel = current.parallel if getattr(current, "parallel", None) else None
    node, nodes = (parallel.node_index, parallel.num_nodes) if parallel is not None else (0, 1)
    # A disrupted job is submitted again as the same attempt: the launch number distinguishes them
    launch = disruptions.of_run(current.run_id).launch(current.step_name, current.retry_count)
    name = f"{current.run_id}/{current.step_name}/{launch}/{_calls}"
    timeout_s = CLUSTER_JOIN_S if _metaflow.in_container() else LOCAL_JOIN_S
    with work_folder(str(current.run_id), f"{current.step_name}-script", f"{current.task_id}") as work_dir:
        job = _job(
            plan, script, arguments, keywords or {}, work_dir, nodes, processes_per_node, hang_timeout_s
        )
        job = replace(job, checkpoint_dir=checkpoint_dir)
        first_rank = node * job.layout.processes_per_node
        with _rendezvous(f"runs/{name}/rendezvous.json", node, nodes, timeout_s) as (ports, secret):
            address = NodeAddress(
                node=node,
                nodes=nodes,
                main_host=parallel.main_ip if parallel is not None else "127.0.0.1",
                ports=ports,
                secret=secret,
                run=name,
                join_timeout_s=timeout_s,
            )
            with _following(job.logs_dir, first_rank):
                run_node(job, address, on_event=on_event)


def _job(
    plan: Plan | None,
    script: str | Path | Callable[..., Any],
    arguments: Sequence[Any],
    keywords: Mapping[str, Any],
    work_dir: Path,
    nodes: int,
    processes_per_node: int | None,
    hang_timeout_s: float,
) -> ScriptJob:
    machine = local_machine.detect()
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
        call = work_dir / "call.pickle"
        call.write_bytes(values_of(*arguments, **keywords))
        arguments = ()
    else:
        file = Path(script).resolve()
        if not file.is_file():
            raise UserError(
                f"There is no script {script}.",
                f"Give an absolute path, or one relative to {Path.cwd()}, where the step runs.",
            )
    return ScriptJob(
        script=file,
        arguments=tuple(str(argument) for argument in arguments),
        function=function,
        call=call,
        work_dir=work_dir / "node",
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


@contextlib.contextmanager
def _rendezvous(
    key: str, node: int, nodes: int, timeout_s: float
) -> Iterator[tuple[tuple[int, ...], Secret]]:
    """Agree on ports and secret through the run's datastore, where node 0 keeps them until the block ends."""
    if nodes == 1:
        yield (), Secret("")
    elif node == 0:
        store, ports, secret = datastore(), choose_ports(local=not _metaflow.in_container()), Secret.make()
        store.put_bytes(key, json.dumps({"ports": ports, "secret": secret.text}).encode())
        try:
            yield ports, secret
        finally:
            store.delete([key])
    else:
        yield _published(key, timeout_s)


def _published(key: str, timeout_s: float) -> tuple[tuple[int, ...], Secret]:
    """Wait for the ports and the secret of node 0. Raises UserError after ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        with contextlib.suppress(FileNotFoundError):
            values = json.loads(datastore().get_bytes(key))
            return tuple(values["ports"]), Secret(values["secret"])
        time.sleep(_POLL_S)
    raise UserError(
        f"Node 0 did not start its script within {timeout_s:g} s.", "Check the log of the step's first task."
    )


@contextlib.contextmanager
def _following(logs: Path, rank: int) -> Iterator[None]:
    """Copy the output of this node's first rank to the task's output while it runs."""
    stop = threading.Event()
    streams = ((logs / f"rank-{rank:05d}.out", sys.stdout), (logs / f"rank-{rank:05d}.err", sys.stderr))
    thread = threading.Thread(target=_copy, args=(streams, stop), name="script-output", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(10)


def _copy(streams: Sequence[tuple[Path, TextIO]], stop: threading.Event) -> None:
    offsets = [0] * len(streams)
    decoders = [codecs.getincrementaldecoder("utf-8")("replace") for _ in streams]
    while True:
        is_last = stop.is_set()
        for number, (path, output) in enumerate(streams):
            with contextlib.suppress(FileNotFoundError), path.open("rb") as file:  # until the rank starts
                file.seek(offsets[number])
                if data := file.read():
                    offsets[number] += len(data)
                    output.write(decoders[number].decode(data))
                    output.flush()
        if is_last:
            return
        stop.wait(_POLL_S)
