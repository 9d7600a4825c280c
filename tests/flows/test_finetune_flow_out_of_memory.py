"""After an attempt that runs out of memory, the next one uses a plan that needs less."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import write_sums
from tests.flows.conftest import QUICK, FlowRun
from tests.lab import small_engine

pytestmark = pytest.mark.slow

STEPS = 8

# In every rank: where the micro batch is larger than 1, the third step asks torch for more than there is.
HUNGRY = """
import json, sys
words = list(getattr(sys, "orig_argv", ()))
if "launchers.run.worker" in words:
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


def test_a_retry_after_out_of_memory_halves_the_micro_batch_and_resumes(
    flow: Callable[..., FlowRun], tmp_path: Path
) -> None:
    (tmp_path / "hungry").mkdir()
    (tmp_path / "hungry" / "sitecustomize.py").write_text(HUNGRY)
    check(flow, tmp_path, 1, *QUICK, PYTHONPATH=str(tmp_path / "hungry"))


@pytest.mark.nightly
def test_the_nodes_of_a_retry_agree_on_the_smaller_micro_batch(
    flow: Callable[..., FlowRun], tmp_path: Path
) -> None:
    """Ranks do not train (tests.lab.small_engine); out of memory on one rank affects all nodes."""
    orders = ("step_s=1.5", "do=memory", "at=4", "ranks=[0,1]")  # the checkpoint of step 2 is stored by then
    small = [f"--set=engine_options.{order}" for order in orders]
    nothing_to_evaluate = ("--set=evaluation.generations=0", "--set=evaluation.fraction=0")
    site = small_engine.install(tmp_path / "site")
    check(flow, tmp_path, 2, *QUICK, *small, *nothing_to_evaluate, PYTHONPATH=str(site))


def check(
    flow: Callable[..., FlowRun], folder: Path, nodes: int, *arguments: str, **environment: str
) -> None:
    data = write_sums(folder / "sums.jsonl")
    steps = (f"--max-steps={STEPS}", "--checkpoint-every=2")
    deploy_arguments = (*arguments, *steps, f"--nodes={nodes}", f"--dataset={data}")
    run = flow("run", *deploy_arguments, **environment)
    assert run.returncode == 0, run.output
    planned = 4 // nodes
    assert "DefaultCPUAllocator" in run.output
    assert f"out of memory: a retry will use micro batch {planned} -> {planned // 2}" in run.output
    assert "another plan because an earlier attempt ran out of memory" in run.output
    assert f"from the checkpoint of step 2 of {STEPS}" in run.output
    artifacts = run.artifacts()
    layout = artifacts["plan"].layout
    assert (layout.micro_batch_size, layout.global_batch_size) == (1, 4)
    notes = [
        (note.used, note.given_by) for note in artifacts["plan"].overrides if note.name == "micro_batch_size"
    ]
    assert notes[0] == (str(planned // 2), "out of memory in attempt 0")
    assert notes[-1][0] == "1"
    assert [row["step"] for row in artifacts["metrics"]] == list(range(1, STEPS + 1))
