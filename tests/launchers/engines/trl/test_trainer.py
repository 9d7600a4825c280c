"""GRPO through TRL: the reward rises, and every process reports.

That a run goes on from its checkpoint and what it leaves loads: tests/launchers/engines/methods.py.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from launchers.report.telemetry import Step
from tests.launchers.engines import ranks
from tests.launchers.engines.loop import runs
from tests.launchers.engines.trl import toy

pytestmark = pytest.mark.slow
STEPS = 30


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("grpo")
    toy.make(folder)
    return folder


def rewards(steps: list[Step]) -> list[float]:
    return [step.metrics["reward"] for step in steps if step.metrics is not None]


@pytest.mark.nightly
@pytest.mark.parametrize("nodes", [1, 2])
def test_the_reward_rises_over_thirty_steps(place: Path, nodes: int) -> None:
    # Each of two nodes has two prompts, too: with one, some seeds learn too little in so few steps
    answers = toy.ANSWERS * nodes
    job = toy.job(place, f"full-{nodes}", "full", world=nodes, steps=STEPS, answers=answers)
    layout = dataclasses.replace(job.plan.layout, nodes=nodes, processes_per_node=1)
    job = dataclasses.replace(job, plan=dataclasses.replace(job.plan, layout=layout))
    runs.run_nodes([dataclasses.replace(job, work_dir=job.work_dir / str(node)) for node in range(nodes)])
    steps = runs.steps(dataclasses.replace(job, work_dir=job.work_dir / "0"))
    rewards_seen = rewards(steps)
    assert len(rewards_seen) == STEPS
    assert sum(rewards_seen[-5:]) / 5 > sum(rewards_seen[:5]) / 5 + toy.LEARNT, rewards_seen
    assert all(step.all_tokens for step in steps)


def test_both_processes_of_a_node_report_their_steps(place: Path) -> None:
    job = toy.job(place, "adapted", "lora", world=2, steps=2)
    first, second = runs.run(job), runs.steps(job, rank=1)
    assert [step.step for step in first] == [step.step for step in second] == [1, 2]
    assert {"kl", "reward_std", "answer_tokens"} <= set(first[-1].metrics or {})
    assert {step.loss for step in second} == {None}
    assert all(step.samples == toy.ANSWERS // 2 for step in [*first, *second])


def test_a_reward_that_is_not_a_number_ends_the_run_with_the_line_of_the_users_code(place: Path) -> None:
    (place / "late.py").write_text("def late(prompt, answer):\n    return float('nan')\n")
    job = toy.job(place, "late", "full", world=1, steps=1, of=STEPS, rl={"reward": f"{place}/late.py:late"})
    done = ranks.train([job])
    assert done.returncode != 0
    assert "late.py:late returned nan, for the answer" in done.stderr.strip().splitlines()[-2]
