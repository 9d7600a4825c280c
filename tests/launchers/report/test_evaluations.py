"""The best evaluation, early stopping, and their description, from losses alone."""

from __future__ import annotations

import math

import pytest

from launchers.report.evaluations import (
    HeldOutLoss,
    best_of,
    describe_export,
    evaluation_line,
    evaluations_without_gain,
    exported_step,
    stops_early,
)
from launchers.settings.sections import Evaluation

KEPT = Evaluation(every_steps=10, patience=2)


def losses(*values: float) -> list[HeldOutLoss]:
    return [HeldOutLoss(step=10 * number, loss=value, seconds=1.0) for number, value in enumerate(values, 1)]


def test_the_best_evaluation_has_the_lowest_loss_and_never_nan() -> None:
    best = best_of(losses(2.0, math.nan, 1.0, 1.0, 1.5))
    assert best.step == 30  # the earliest of equal ones
    assert best_of(losses(math.nan)) is None
    assert best_of([]) is None
    assert exported_step(losses(math.nan), KEPT, 10) == 10


def test_a_run_stops_after_the_configured_evaluations_without_a_lower_loss() -> None:
    over = [stops_early(losses(*values), KEPT) for values in ((3.0, 2.0, 2.0), (3.0, 2.0, 2.0, 2.5))]
    assert over == [False, True]
    assert stops_early(losses(3.0, math.nan, math.nan), KEPT)
    assert not stops_early(losses(3.0, 4.0, 5.0, 6.0), Evaluation(every_steps=10))


def test_small_improvements_that_add_up_to_more_than_min_delta_count() -> None:
    falling = losses(2.0, 1.96, 1.92, 1.88)
    assert [evaluations_without_gain(falling[:count], 0.1) for count in (3, 4)] == [2, 0]
    assert [evaluations_without_gain(losses(2.0, lower), 0.5) for lower in (1.5, 1.49)] == [1, 0]


def test_a_run_describes_which_step_it_exports_and_why_it_ended() -> None:
    evaluations = losses(2.0, 1.0, 1.5, 1.6)
    assert (
        exported_step(evaluations, KEPT, 40),
        exported_step(evaluations, Evaluation(every_steps=10), 40),
    ) == (20, 40)
    assert exported_step(evaluations, Evaluation(every_steps=10, patience=2, keep_best=False), 40) == 40
    rows = dict(describe_export(evaluations, KEPT, exported=20, last_step=40))
    assert rows["exported"] == "step 20 of 40, the lowest held-out loss (1.0000)"
    assert rows["stopped early"].startswith("after step 40: 2 evaluations without a lower held-out loss")
    by_half = Evaluation(every_steps=10, patience=2, min_delta=0.5)
    stopped = dict(describe_export(evaluations, by_half, exported=20, last_step=40))["stopped early"]
    assert stopped.startswith("after step 40: 2 evaluations without a held-out loss lower by more than 0.5; ")
    lost = dict(describe_export(evaluations, KEPT, exported=40, last_step=40))
    assert "the checkpoint of step 20" in lost["exported"]
    assert "unusable" in lost["exported"]
    last = dict(describe_export(evaluations, Evaluation(every_steps=10), exported=40, last_step=40))
    assert last == {"exported": "step 40 of 40; the lowest held-out loss was 1.0000 after step 20"}
    assert describe_export([], KEPT, exported=40, last_step=40) == []


def test_the_line_of_an_evaluation_marks_a_new_lowest_loss() -> None:
    assert evaluation_line(losses(2.0, 1.0)) == "held-out loss 1.0000 after step 20, the lowest so far, 1.0 s"
    assert "the lowest is 1.0000 of step 20" in evaluation_line(losses(2.0, 1.0, math.nan))


def test_trackers_get_a_perplexity_only_for_losses_per_token() -> None:
    (loss,) = losses(1.0)
    assert loss.figures("sft") == {"eval/loss": 1.0, "eval/perplexity": pytest.approx(math.e)}
    pairs = HeldOutLoss(step=1, loss=0.6, seconds=1.0, metrics={"accuracy": 0.75})
    assert pairs.figures("dpo") == {"eval/loss": 0.6, "eval/accuracy": 0.75}
    limits = [loss.figures("sft")["eval/perplexity"] for loss in losses(699.9, 700.0)]
    assert [math.isinf(perplexity) for perplexity in limits] == [False, True]
