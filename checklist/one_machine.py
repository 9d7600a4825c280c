"""Headline and next commands of a run on one machine, where no network is measured."""

from __future__ import annotations

from collections.abc import Iterable

from checklist.measurements import Measurements
from checklist.result import CheckResult

SPEED = ("gemm", "hbm", "host-copy", "peer-copy", "latency", "bandwidth", "pairs")


def is_one(run: Measurements) -> bool:
    """Return whether no measurement crossed a network."""
    return run.local or len(run.nodes) == 1


def headline(run: Measurements, checks: Iterable[CheckResult]) -> str | None:
    """Return the headline of a PASS; None for several machines, or if correctness did not pass."""
    verdicts = {check.check: check.verdict for check in checks}
    if not is_one(run) or verdicts.get("correctness") != "PASS":
        return None
    passed = [name for name in SPEED if verdicts.get(name) == "PASS"]
    where = "all nodes are on this one machine" if run.local else "there is one node"
    if not passed:
        return f"Software works; speed not judged: {where}."
    return f"Software works; {', '.join(passed)} as fast as expected; network not judged: {where}."


def next_commands(run: Measurements) -> tuple[str, ...]:
    """Return commands that measure a network: torchrun (on each of two nodes), and the flow."""
    if not is_one(run):
        return ()
    gpus = f" --gpus-per-node {run.gpus_per_node_asked}" if run.device == "cuda" else ""
    processes = f"--nproc-per-node {run.gpus_per_node_asked}"
    rendezvous = "--node-rank $NODE_RANK --master-addr $MASTER_ADDR --master-port 29500"
    return (
        f"torchrun --nnodes 2 {processes} {rendezvous} -m checklist --profile standard",
        f"finetune check --with kubernetes --nodes 2{gpus} --profile standard",
    )
