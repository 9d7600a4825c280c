"""Which plans are tried before a run."""

from __future__ import annotations

from dataclasses import replace

from estimator import Job, Plan, Target, plan
from estimator.models import find
from estimator.planning.trials import TRIED, trial_plans

JOB = Job(model=find("llama-8b"), method="lora", engine="torchtune", global_batch_size=16)


def planned(**target: object) -> Plan:
    return plan(JOB, Target(kind="kubernetes", **target))  # type: ignore[arg-type]


def test_the_launched_plan_comes_first_and_others_are_layouts_of_the_same_machines() -> None:
    launched = planned(gpu="H100 SXM", nodes=1, gpus=8)
    tried = trial_plans(launched, JOB)
    assert tried[0] == launched
    assert len(tried) == TRIED
    assert len({each.layout for each in tried}) == TRIED
    for each in tried:
        assert (each.request, each.layout.world_size) == (launched.request, launched.layout.world_size)
        assert each.layout.global_batch_size == JOB.global_batch_size
        assert each.prediction.memory.fits
    speeds = [each.prediction.tokens_per_second or 0.0 for each in tried[1:]]
    assert speeds == sorted(speeds, reverse=True)
    assert trial_plans(Plan.from_json(launched.to_json()), JOB) == tried, "every node derives the same"


def test_a_trial_plan_records_its_differences_from_the_launched_one() -> None:
    launched = planned(gpu="H100 SXM", nodes=1, gpus=1)
    for each in trial_plans(launched, JOB)[1:]:
        notes = {
            note.name: (note.planned, note.used) for note in each.overrides if note.given_by == "the trial"
        }
        assert notes
        for name, (before, after) in notes.items():
            assert before == str(getattr(launched.layout, name))
            assert after == str(getattr(each.layout, name))


def test_trials_keep_the_micro_batch_of_the_user() -> None:
    own = replace(JOB, micro_batch_size=2)
    launched = plan(own, Target(kind="kubernetes", gpu="H100 SXM", nodes=1, gpus=1))
    assert {each.layout.micro_batch_size for each in trial_plans(launched, own)} == {2}
