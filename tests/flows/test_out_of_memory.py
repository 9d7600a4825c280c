"""After an attempt that runs out of memory the next one takes a plan that needs less, and says so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import write_sums
from tests.flows.conftest import QUICK, FlowRun

pytestmark = pytest.mark.slow

# In every rank: where the micro batch is larger than 1, the third step asks torch for more than there is.
HUNGRY = """
import json, sys
words = list(getattr(sys, "orig_argv", ()))
if "launchers.worker" in words:
    import launchers.report.telemetry as telemetry
    write = telemetry.Writer.write
    job = next(word for word in words if word.endswith("job.json"))
    micro_batch_size = json.load(open(job))["plan"]["layout"]["micro_batch_size"]
    def hungry(self, event):
        write(self, event)
        if isinstance(event, telemetry.Step) and event.step == 3 and micro_batch_size > 1:
            import torch
            torch.empty(2**50)
    telemetry.Writer.write = hungry
"""


@pytest.mark.parametrize("nodes", [1, 2])
def test_the_retry_halves_the_micro_batch_goes_on_from_the_checkpoint_and_records_it(
    flow: Callable[..., FlowRun], tmp_path: Path, nodes: int
) -> None:
    (tmp_path / "hungry").mkdir()
    (tmp_path / "hungry" / "sitecustomize.py").write_text(HUNGRY)
    data = write_sums(tmp_path / "sums.jsonl")
    run = flow(
        "run",
        *QUICK,
        f"--nodes={nodes}",
        f"--dataset={data}",
        "--checkpoint-every=2",
        PYTHONPATH=str(tmp_path / "hungry"),
    )
    assert run.returncode == 0, run.output
    planned = 4 // nodes
    assert "DefaultCPUAllocator" in run.output
    assert f"out of memory: a retry goes on with micro batch {planned} -> {planned // 2}" in run.output
    assert "another plan, as an earlier attempt ran out of memory" in run.output
    assert "going on from the checkpoint of step 2 of 8" in run.output
    found = run.artifacts()
    layout = found["plan"].layout
    assert layout.micro_batch_size == 1
    assert layout.global_batch_size == 4
    notes = [
        (note.used, note.given_by) for note in found["plan"].overrides if note.name == "micro_batch_size"
    ]
    assert notes[0] == (str(planned // 2), "out of memory in attempt 0")
    assert notes[-1][0] == "1"
    assert [row["step"] for row in found["metrics"]] == list(range(1, 9))
