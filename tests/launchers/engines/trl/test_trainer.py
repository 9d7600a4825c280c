"""GRPO through TRL: the reward rises, a run goes on from its checkpoint, what is left loads anywhere."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from launchers import engines
from launchers.gang.job import TrainJob
from launchers.report.telemetry import Step
from tests.launchers.engines import ranks
from tests.launchers.engines.loop import runs
from tests.launchers.engines.trl import toy

pytestmark = pytest.mark.slow
STEPS, LEARNT = 30, 0.1
CHECKPOINT, WHOLE = 2, 4


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("grpo")
    toy.make(folder)
    return folder


@pytest.fixture(scope="module")
def adapted(place: Path) -> TrainJob:
    """A short run of LoRA on two processes that has left a checkpoint and a result."""
    job = toy.job(place, "adapted", "lora", world=2, steps=WHOLE, checkpoint_every=CHECKPOINT)
    runs.run(job)
    return job


def rewards(steps: list[Step]) -> list[float]:
    return [step.metrics["reward"] for step in steps if step.metrics is not None]


def test_the_reward_rises_over_thirty_steps(place: Path) -> None:
    job = toy.job(place, "full", "full", world=1, steps=STEPS)
    steps = runs.run(job)
    found = rewards(steps)
    assert len(found) == STEPS
    assert sum(found[-5:]) / 5 > sum(found[:5]) / 5 + LEARNT, found
    assert all(step.all_tokens for step in steps)


def test_a_run_that_goes_on_from_its_checkpoint_does_what_the_whole_one_does(
    place: Path, adapted: TrainJob
) -> None:
    rest = runs.resumed(adapted, place / "resumed", CHECKPOINT)
    after = runs.run(rest)
    whole = runs.steps(adapted)
    assert [step.step for step in after] == [step.step for step in whole[CHECKPOINT:]]
    for again, first in zip(after, whole[CHECKPOINT:], strict=True):
        assert again.loss == pytest.approx(first.loss, abs=1e-6)
        assert again.metrics == pytest.approx(first.metrics, abs=1e-6)
        assert again.lr == pytest.approx(first.lr)
    assert {"kl", "reward_std", "answer_tokens"} <= set(whole[-1].metrics or {})


def test_both_processes_say_what_they_did_and_their_prompts_are_those_of_the_prepared_order(
    adapted: TrainJob,
) -> None:
    first, second = runs.steps(adapted), runs.steps(adapted, rank=1)
    assert [step.step for step in first] == [step.step for step in second]
    assert {step.loss for step in second} == {None}
    assert all(step.samples == toy.ANSWERS // 2 for step in [*first, *second])


def test_what_is_left_loads_in_transformers_and_peft(adapted: TrainJob, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    engines.get("trl").collect(adapted, tmp_path)
    AutoTokenizer.from_pretrained(tmp_path / "model")
    ids = torch.arange(20, 40)[None]
    with torch.no_grad():
        base = AutoModelForCausalLM.from_pretrained(adapted.model_dir)
        before = base(ids).logits
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "model")(ids).logits
        beside = PeftModel.from_pretrained(base, str(tmp_path / "adapter"))(ids).logits
    torch.testing.assert_close(merged, beside, atol=2e-3, rtol=0)
    assert (merged - before).abs().max() > 0.01


def test_a_reward_that_is_no_number_ends_the_run_with_the_users_own_line(place: Path) -> None:
    (place / "late.py").write_text("def late(prompt, answer):\n    return float('nan')\n")
    job = toy.job(place, "late", "full", world=1, steps=1, of=STEPS, rl={"reward": f"{place}/late.py:late"})
    done = ranks.train([job])
    assert done.returncode != 0
    assert "late.py:late returned nan, for the answer" in done.stderr.strip().splitlines()[-2]
