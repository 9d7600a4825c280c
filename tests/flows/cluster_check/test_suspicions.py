"""A training run reports its straggler, and the next checklist measures that node first."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from checklist.verdict import judge
from flows.cluster_check import suspicions
from launchers.report.telemetry import Straggling
from launchers.store.bundles import LocalStorage
from tests.checklist.clusters import Cluster
from tests.checklist.runs import gpu_run, with_pairs
from tests.conftest import write_sums
from tests.flows.conftest import FLOW, environment, left_behind, read_card, run_flow, start_flow

SOON = 20  # steps
STEPS = 30
STOPPED_S, RUNS_S = 0.1, 0.02  # often in a step: as a processor that is slow, wherever it computes


def _pid_of_rank_1(home: Path) -> int | None:
    """Return the process of rank 1 once it has made a step."""
    for file in home.glob("work/**/telemetry/rank-00001.jsonl"):
        events = [json.loads(line) for line in file.read_text().splitlines()]
        if any(event["kind"] == "step" for event in events):
            return next(int(event["pid"]) for event in events if event["kind"] == "dist")
    return None


@contextlib.contextmanager
def _slowed(home: Path, training: subprocess.Popen[str]) -> Iterator[None]:
    """Stop rank 1 most of the time, from its first step on."""
    stop = threading.Event()

    def slow() -> None:
        while (pid := _pid_of_rank_1(home)) is None and training.poll() is None and not stop.wait(0.2):
            continue
        with contextlib.suppress(ProcessLookupError):
            while pid is not None and not stop.is_set():
                os.kill(pid, signal.SIGSTOP)
                time.sleep(STOPPED_S)
                os.kill(pid, signal.SIGCONT)
                time.sleep(RUNS_S)

    thread = threading.Thread(target=slow)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _late(rank: int, host: str, **changes: Any) -> Straggling:
    values = {"local_rank": 0, "node": rank, "since": 3, "step": 20, "share": 0.4, "whole_node": True}
    return Straggling(**{"rank": rank, "host": host, **values, **changes})


def test_suspicions_of_training_runs_are_read_until_a_checklist_measures_the_node(tmp_path: Path) -> None:
    store = LocalStorage(tmp_path)
    for rank in (1, 2):
        one = _late(rank, f"host-{rank}")
        suspicions.record(one, cluster="kubernetes:a.b:6443", run="7", on_gpus=True, store=store)
    suspicions.record(_late(3, "host-3", over=True), cluster="kubernetes:a.b:6443", run="7", on_gpus=True)
    assert suspicions.read("kubernetes:a.b", store) == ()
    remaining = suspicions.read("kubernetes:a.b:6443", store)
    assert [each.node for each in remaining] == ["host-1", "host-2"]
    line = (
        "Training run 7 reported: node 1 (host-1) is late: "
        "it delays the others by 40% of each step since step 3."
    )
    assert suspicions.notes(remaining)[0] == line
    healthy = with_pairs(gpu_run(8), Cluster(nodes=8, speed=45))
    suspicions.remove_measured(remaining, judge(healthy, suspects=("host-1",)), store)
    assert [each.node for each in suspicions.read("kubernetes:a.b:6443", store)] == ["host-2"]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.nightly
def test_a_slowed_rank_is_named_within_20_steps_and_in_the_next_checklist(tmp_path: Path) -> None:
    data = write_sums(tmp_path / "sums.jsonl")
    training = start_flow(
        tmp_path,
        [
            *("run", "--model=tiny-llama", f"--dataset={data}", "--engine=fsdp2", "--method=full"),
            *("--nodes=2", f"--max-steps={STEPS}", "--epochs=50", "--global-batch-size=4", "--seq-len=128"),
            *("--set=log_every=1", "--set=evaluation.generations=0", "--set=checkpoint_every=0"),
        ],
    )
    with _slowed(tmp_path, training):
        training.wait(600)
    log = (tmp_path / "log").read_text()
    assert training.returncode == 0, log
    assert left_behind(tmp_path) == []
    name = os.uname().nodename
    warnings = re.findall(rf"WARNING: node 1 \({name}\) is late: .* since step (\d+)", log)
    assert len(warnings) == 1, log
    before = log[: log.index("WARNING: node 1")]
    at = max(int(step) for step in re.findall(rf"step (\d+)/{STEPS}", before))
    assert at - int(warnings[0]) <= SOON
    assert "WARNING: node 0" not in log

    run = (tmp_path / "run_id").read_text()
    task = re.findall(rf"\[{run}/train_nodes/(\d+)", before)[-1]  # the one that has named it
    shown = read_card(tmp_path, environment(tmp_path), FLOW, f"{run}/train_nodes/{task}", "finetune")
    assert f"node 1 ({name}) is late" in shown.replace("\\", "")

    checklist = FLOW.with_name("checklist_flow.py")
    check = run_flow(
        tmp_path, "run", "--only=ranks", flow=checklist, timeout=480, AWS_EC2_METADATA_DISABLED="true"
    )
    assert f"Training run {run} reported: node 1 ({name}) is late" in check.text, check.text
