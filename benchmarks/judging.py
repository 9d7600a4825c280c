"""Measure how long the checklist's judges take for a large run, and the size of its result.

    python -m benchmarks.judging    # about two minutes; writes benchmarks/results/judging.*

Synthetic measurements of p5.48xlarge machines as a run makes them (every kind of figure of each GPU with its
samples, all connections, 16 rounds of pairs) go through the very functions of a run: history read and folded,
judged, the result as JSON, and what is kept of it. Each size runs in a process of its own.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from benchmarks.machine import describe
from checklist import past_runs
from checklist import result as results
from checklist.analysis.baseline import DAY_S
from checklist.measurements import Local, Measurements, Nic
from checklist.verdict import judge
from tests.checklist.clusters import Cluster
from tests.checklist.runs import gpu_run, with_pairs

RESULTS = Path(__file__).parent / "results"
COMMAND = "python -m benchmarks.judging"
SIZES = ((128, 8), (256, 8), (1024, 8))
NIGHTS = 30
SPREAD = 0.01  # of a GPU's figures
FIGURES = {
    "gemm_bf16": (760.0, "TFLOPS"),
    "hbm_copy": (2850.0, "GB/s"),
    "h2d": (55.0, "GB/s"),
    "d2h": (54.0, "GB/s"),
}
PEER_COPY = (370.0, "GB/s")
LIMITS = {"judge_seconds": 5.0, "result_mb": 20.0}
T = TypeVar("T")


def measured(nodes: int, gpus: int, night: int, *, faults: bool) -> Measurements:
    """Build the measurements of a run; optionally with a slow GPU, a slow node and a slow link."""
    random = np.random.default_rng([nodes, night])
    run = gpu_run(nodes, gpus, started_unix=night * DAY_S)
    devices = tuple(Nic(name=f"rdmap{index}s0", mtu=4096, gbps=100.0, up=True) for index in range(32))
    facts = tuple(dataclasses.replace(fact, nics=(*fact.nics, *devices)) for fact in run.facts)

    def figure(rank: int, what: str, value: float, unit: str, peer: int | None = None) -> Local:
        if faults and (rank, what) == (11, "gemm_bf16"):
            value *= 0.7
        samples = value * (1 - np.abs(random.normal(0, SPREAD, 9)))
        median = float(np.median(samples))
        return Local(
            rank=rank, what=what, value=median, unit=unit, samples=tuple(samples.tolist()), peer=peer
        )

    ranks = range(nodes * gpus)
    alone = [figure(rank, what, *usual) for rank in ranks for what, usual in FIGURES.items()]
    copies = [
        figure(rank, "peer_copy", *PEER_COPY, peer=peer)
        for rank in ranks
        for peer in range(rank - rank % gpus, rank - rank % gpus + gpus)
        if peer != rank
    ]
    run = dataclasses.replace(run, facts=facts, locals=(*alone, *copies))
    slow = {7: 0.4} if faults else {}
    first = next((p.src, p.dst) for p in run.pairs if 7 not in (p.src, p.dst))
    links = {first: 0.5, first[::-1]: 0.5} if faults else {}
    return with_pairs(run, Cluster(nodes=nodes, speed=45, transmit=slow, receive=slow, links=links))


def timed(call: Callable[[], T]) -> tuple[T, float]:
    """Return the result of a call and its CPU seconds."""
    start = time.process_time()
    result = call()
    return result, time.process_time() - start


def measure(nodes: int, gpus: int, folder: Path) -> dict[str, Any]:
    """Judge one size: without past runs, then with those of 30 nights, healthy and with faults."""
    fresh = measured(nodes, gpus, NIGHTS, faults=False)
    first, alone_s = timed(lambda: judge(fresh))
    place = folder / "history.jsonl"
    line = dataclasses.asdict(past_runs.run_of(first))
    with place.open("w") as file:
        for night in range(NIGHTS):  # the same figures each night, as drawing new ones takes far longer
            at = night * DAY_S
            records = [{**record, "unix": at} for record in line["records"]]
            stored_run = {**line, "started_unix": at, "finished_unix": at + 60, "records": records}
            file.write(json.dumps(stored_run) + "\n")
    past, read_s = timed(lambda: past_runs.read(place))
    known: dict[str, Any] = {
        "history": past.records,
        "sightings": past.sightings,
        "pairs_seen": past.pairs_seen,
    }
    healthy, healthy_s = timed(lambda: judge(fresh, **known))
    spoilt = measured(nodes, gpus, NIGHTS + 1, faults=True)
    sick, sick_s = timed(lambda: judge(spoilt, **known))
    text, write_s = timed(lambda: results.to_json(sick))
    return {
        "nodes": nodes,
        "gpus": nodes * gpus,
        "verdicts": [first.verdict, healthy.verdict, sick.verdict],
        "findings": [f"{fault.verdict} {fault.title}" for fault in sick.findings],
        "judge_s": alone_s,
        "with_history_s": healthy_s,
        "with_faults_s": sick_s,
        "read_history_s": read_s,
        "write_s": write_s,
        "result_mb": len(text.encode()) / 1e6,
        "night_mb": place.stat().st_size / NIGHTS / 1e6,
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }


def markdown(report: dict[str, Any]) -> str:
    rows = [
        f"| {row['nodes']} x {row['gpus'] // row['nodes']} | {row['judge_s']:.1f} s "
        f"| {row['with_history_s']:.1f} s | {row['with_faults_s']:.1f} s | {row['read_history_s']:.1f} s "
        f"| {row['write_s']:.1f} s | {row['result_mb']:.1f} MB | {row['night_mb']:.2f} MB "
        f"| {row['peak_gib']:.1f} GiB |"
        for row in report["rows"]
    ]
    return "\n".join(
        [
            "# Judging large runs",
            "",
            f"`{COMMAND}` {report['machine']['text']}; processor time of one core.",
            "",
            "Synthetic measurements of p5.48xlarge machines: six kinds of figures of each GPU with samples,",
            f"all connections, 16 rounds of pairs. *Judged*: without history; with one of {NIGHTS} nights;",
            "the same with a slow GPU, a slow node and a slow link. *Read*: those nights. *Written*: the",
            "result as JSON, with its size; up to 1,024 GPUs it keeps everything. *A night*: the",
            "line that the history keeps of it.",
            "",
            "| machines x GPUs | judged | with history | with faults | read | written | result | a night "
            "| memory |",
            "|---|---|---|---|---|---|---|---|---|",
            *rows,
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", type=int, nargs=2, metavar=("NODES", "GPUS"), help="one size, as JSON")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of judging.json and judging.md")
    chosen = parser.parse_args()
    if chosen.only:
        nodes, gpus = chosen.only
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(measure(nodes, gpus, Path(folder))))
        return
    rows = []
    for nodes, gpus in SIZES:
        command = [sys.executable, "-m", "benchmarks.judging", "--only", str(nodes), str(gpus)]
        rows.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
        print(rows[-1], flush=True)
    report = {"command": COMMAND, "machine": describe(), "limits": LIMITS, "rows": rows}
    (chosen.out / "judging.json").write_text(json.dumps(report, indent=1) + "\n")
    (chosen.out / "judging.md").write_text(markdown(report))
    last = rows[-1]
    if max(last["judge_s"], last["with_faults_s"]) > LIMITS["judge_seconds"]:
        raise SystemExit(f"Judging took longer than {LIMITS['judge_seconds']:g} s.")
    if last["result_mb"] > LIMITS["result_mb"]:
        raise SystemExit(f"The result is larger than {LIMITS['result_mb']:g} MB.")


if __name__ == "__main__":
    main()
