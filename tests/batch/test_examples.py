"""An example flow with the user's own training code on AWS Batch's interface, over two containers."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from tests.batch.lab import Lab

pytestmark = [pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(1200)]

FLOW = Path(__file__).parents[2] / "examples" / "ddp_flow.py"
LIMIT_S = 600  # a minute on a machine that does nothing else
STEPS = 12_000


def test_plain_ddp_continues_from_its_checkpoint_after_a_container_is_lost(lab: Lab, tmp_path: Path) -> None:
    where = ["--with", "batch", f"--steps={STEPS}", "--checkpoint-every=1000"]
    run = lab.start(tmp_path, "run", *where, flow=FLOW)
    run.wait_for(lambda: run.has_begun, LIMIT_S)
    checkpoints = f"metaflow/DdpFlow/finetune/runs/{run.run_id}/own-checkpoints/"
    run.wait_for(lambda: lab.store.keys_below(checkpoints), LIMIT_S)
    (job,) = run.jobs("train")
    job.pods[1].kill()
    lost = time.monotonic()
    run.wait_for(lambda: job.stopped is not None, 120)
    assert time.monotonic() - lost < 100, (
        "of which the task needs seconds on a machine that does nothing else"
    )
    assert run.end(LIMIT_S) == 0, run.log + run.pods_log()
    resumed = re.findall(r"resumes at step (\d+)", run.log)
    assert resumed, run.log + run.pods_log()
    assert all(int(step) > 1000 for step in resumed)
    assert f"steps on each node: [{STEPS}, {STEPS}]" in run.log
    assert [each.status for each in run.jobs("train")] == ["FAILED", "SUCCEEDED"]
