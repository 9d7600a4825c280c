"""Measure planning, preflight, channel and records at 5,000 nodes and a gang of 1,024.

    python -m benchmarks.scale    # some minutes on 2 cores; writes benchmarks/results/scale.*

Needs a control plane's binaries (CONTRIBUTING.md). The nodes are objects on a real API server, with nothing
behind them. The gang's members are real clients of the channel, 128 per process, without training; node 0
runs in a separate process. The checklist's records at that size: python -m benchmarks.judging.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import psutil

from benchmarks.machine import describe
from decorators.backends.disruptions import Disruption, Disruptions
from decorators.backends.kubernetes.nodes import PodSettings
from decorators.backends.kubernetes.preflight import inspect
from decorators.backends.options import Options
from estimator.hardware.cluster.api import Clock
from estimator.plan import Plan
from launchers.cluster.endpoint import NodeAddress, Secret
from launchers.gang.control import Timeouts
from launchers.gang.hub import Hub
from launchers.gang.member import Member
from launchers.store.bundles import LocalStorage
from launchers.store.checkpoints import CheckpointStore
from tests.lab import control_plane
from tests.lab.control_plane import ControlPlane, wait_for
from tests.lab.kubelet import Node

RESULTS = Path(__file__).parent / "results"
COMMAND = "python -m benchmarks.scale"
NODES, GANG = 5000, 1024
GROUP = 128  # members in a process
GPUS = 8
IDLE_S = 10.0
LIMIT_S = 600.0
PLAN = ("--model=llama-70b", "--method=full", f"--nodes={GANG}", f"--global-batch-size={GANG * GPUS}")
T = TypeVar("T")


def timed(call: Callable[[], T]) -> tuple[T, float]:
    """Return a call's result and its duration in seconds."""
    begin = time.monotonic()
    result = call()
    return result, time.monotonic() - begin


# -- a cluster ---------------------------------------------------------------------------------------------


def cluster(folder: Path, nodes: int) -> dict[str, Any]:
    """Plan for a gang on a cluster of ``nodes`` p5.48xlarge, and run the preflight of that plan."""
    with ControlPlane(folder / "control-plane") as plane:
        _, added_s = timed(lambda: _add(plane, nodes))
        os.environ["KUBECONFIG"] = str(plane.kubeconfig())
        try:
            command = [sys.executable, "-m", "estimator.cli.app", "plan", "--from-cluster", *PLAN, "--json"]
            done, plan_s = timed(
                lambda: subprocess.run(command, check=True, capture_output=True, text=True, timeout=LIMIT_S)
            )
            plan = Plan.from_json(json.dumps(json.loads(done.stdout)["plans"][0]))
            (findings, _), preflight_s = timed(
                lambda: inspect(
                    plan.request, options=Options(), pods=PodSettings(), clock=Clock(overall_s=LIMIT_S)
                )
            )
        finally:
            del os.environ["KUBECONFIG"]
    return {
        "nodes": nodes,
        "added_seconds": added_s,
        "plan_seconds": plan_s,
        "plan_bytes": len(plan.to_json()),
        "preflight_seconds": preflight_s,
        "fit": [row.detail for row in findings.rows if row.check == "nodes"],
    }


def _add(plane: ControlPlane, nodes: int) -> None:
    def add(number: int) -> None:
        node = Node(
            name=f"gpu-{number:05d}",
            instance_type="p5.48xlarge",
            cpu="192",
            memory="2048Gi",
            extended={"nvidia.com/gpu": str(GPUS), "vpc.amazonaws.com/efa": "32"},
        )
        api = plane.api()
        body = node.manifest() | {"status": node.status("10.0.0.1")}
        api.create("/api/v1/nodes", body)
        api.patch(f"/api/v1/nodes/{node.name}", {"spec": {"taints": []}})

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(add, range(nodes)))


# -- a gang ------------------------------------------------------------------------------------------------


def _address(node: int, nodes: int, port: int) -> NodeAddress:
    where = {"main_host": "127.0.0.1", "ports": (port,), "secret": Secret("scale"), "run": "scale"}
    return NodeAddress(node=node, nodes=nodes, **where)  # type: ignore[arg-type]


def run_members(first: int, count: int, nodes: int, port: int) -> None:
    """Run ``count`` members of the gang in this process: join, then print the time of the verdict."""
    members = [Member(_address(node, nodes, port), Timeouts()) for node in range(first, first + count)]
    print("ready", flush=True)
    sys.stdin.readline()
    with ThreadPoolExecutor(count) as pool:
        list(pool.map(Member.join, members))
    print("joined", flush=True)
    wait_for(lambda: all(member.verdict() for member in members), LIMIT_S, "the verdict arrives", every=0.01)
    print(time.monotonic(), flush=True)
    for member in members:
        member.close()


@contextmanager
def _groups(nodes: int, port: int) -> Iterator[list[subprocess.Popen[str]]]:
    """Start processes of members 1 to ``nodes - 1``; the last member is alone in the last process."""
    command = [sys.executable, "-m", "benchmarks.scale", "--members"]
    starts = [*range(1, nodes - 1, GROUP), nodes - 1]
    groups = [
        subprocess.Popen(
            [*command, str(first), str(after - first), str(nodes), str(port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for first, after in zip(starts, [*starts[1:], nodes], strict=True)
    ]
    try:
        for group in groups:
            assert group.stdout is not None
            assert group.stdout.readline() == "ready\n"
        yield groups
    finally:
        for group in groups:
            group.kill()
            group.wait()


def gang(nodes: int) -> dict[str, Any]:
    """Measure a gang that joins, idles, and loses its last node: seconds, CPU share and memory."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    process = psutil.Process()
    before = process.memory_info().rss
    hub = Hub(_address(0, nodes, port), Timeouts())
    try:
        with _groups(nodes, port) as groups:
            for group in groups:
                assert group.stdin is not None
                group.stdin.write("go\n")
                group.stdin.flush()
            _, joined_s = timed(hub.join)
            outputs = [group.stdout for group in groups if group.stdout is not None]
            assert [output.readline() for output in outputs] == ["joined\n"] * len(groups)
            used = sum(process.cpu_times()[:2])
            time.sleep(IDLE_S)
            busy = (sum(process.cpu_times()[:2]) - used) / IDLE_S
            memory = process.memory_info().rss - before
            lost = time.monotonic()
            groups[-1].send_signal(signal.SIGKILL)
            verdict = wait_for(hub.verdict, LIMIT_S, "the hub has a verdict", every=0.01)
            assert verdict.failure is not None
            assert verdict.failure.node == nodes - 1
            decided = time.monotonic()
            last_received = max(float(output.readline()) for output in outputs[:-1])
    finally:
        hub.close()
    return {
        "nodes": nodes,
        "joined_seconds": joined_s,
        "idle_share_of_a_core": busy,
        "hub_mib": memory / 2**20,
        "decided_seconds": decided - lost,
        "notified_seconds": last_received - decided,
    }


# -- records -----------------------------------------------------------------------------------------------


def records(folder: Path, nodes: int) -> dict[str, Any]:
    """Measure a gang's records in its store: sizes, and the time to write and find them."""
    storage = LocalStorage(folder / "store")
    checkpoints = CheckpointStore(storage, "checkpoints/1")
    part = folder / "part"
    part.mkdir()
    for gpu in range(GPUS):
        (part / f"rank-{gpu:05d}.pt").write_bytes(b"weights")

    def put() -> None:
        for node in range(nodes):
            checkpoints.put_part(10, node, part)

    _, put_s = timed(put)
    committed, commit_s = timed(
        lambda: checkpoints.commit(10, nodes=nodes, world_size=nodes * GPUS, extra={})
    )
    latest, find_s = timed(checkpoints.latest)
    assert latest == committed
    lost = tuple(f"pod js-1b2c3d-worker-{node}-0-x7k2p on node-{node}: deleted" for node in range(nodes))
    noted = Disruptions(storage=storage, run="1")
    noted.note("train_nodes", Disruption(at=time.time(), lost=lost))
    (disruption,) = storage.keys("disruptions/1")
    return {
        "nodes": nodes,
        "parts_seconds": put_s,
        "commit_seconds": commit_s,
        "find_seconds": find_s,
        "checkpoint_bytes": len(storage.get_bytes(f"{committed.key}/checkpoint.json")),
        "keys": len(storage.keys(committed.key)),
        "disruption_bytes": len(storage.get_bytes(disruption)),
    }


def text(result: dict[str, Any]) -> str:
    plans, channel, record_sizes = result["cluster"], result["gang"], result["records"]
    return f"""# Scale

`{result["command"]}`, {result["machine"]["text"]}

| {plans["nodes"]:,} nodes (p5.48xlarge) on a real API server | |
|---|---|
| `finetune plan --from-cluster {" ".join(PLAN)}` | {plans["plan_seconds"]:.1f} s |
| the preflight of that plan, all queries | {plans["preflight_seconds"]:.1f} s |
| the plan as JSON | {plans["plan_bytes"] / 1000:.0f} kB |

| the channel of {channel["nodes"]:,} nodes, all on this machine | |
|---|---|
| all have joined after | {channel["joined_seconds"]:.1f} s |
| node 0 while nothing happens | {channel["idle_share_of_a_core"]:.0%} of a core |
| its memory | {channel["hub_mib"]:.0f} MiB |
| the loss of a killed node is decided after | {channel["decided_seconds"]:.2f} s |
| and all other nodes are notified within | {channel["notified_seconds"]:.2f} s |

| records of {record_sizes["nodes"]:,} nodes of {GPUS} GPUs, on a local disk | |
|---|---|
| a checkpoint's parts stored (without weights), sequentially | {record_sizes["parts_seconds"]:.1f} s |
| its commit, which checks every part | {record_sizes["commit_seconds"]:.1f} s |
| finding it, with all parts | {record_sizes["find_seconds"]:.1f} s |
| its keys; `checkpoint.json` | {record_sizes["keys"]:,}; {record_sizes["checkpoint_bytes"]:,} bytes |
| the record of a disruption of all pods | {record_sizes["disruption_bytes"] / 1000:.0f} kB |
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--members", type=int, nargs=4, help=argparse.SUPPRESS)  # for the processes of a gang
    chosen = parser.parse_args()
    if chosen.members:
        run_members(*chosen.members)
        return
    if reason := control_plane.missing():
        sys.exit(reason)
    with tempfile.TemporaryDirectory() as name:
        result = {
            "command": COMMAND,
            "machine": describe(),
            "gang": gang(GANG),
            "records": records(Path(name), GANG),
            "cluster": cluster(Path(name), NODES),
        }
    (RESULTS / "scale.json").write_text(json.dumps(result, indent=1) + "\n")
    (RESULTS / "scale.md").write_text(text(result))
    print(text(result))


if __name__ == "__main__":
    main()
