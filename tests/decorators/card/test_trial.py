"""The table of measured plans on the card."""

from __future__ import annotations

from dataclasses import replace

from decorators.card.step import draw
from decorators.card.trial import trial_rows
from launchers.report.state import RankMeasured
from launchers.run.trial import TrialResult
from tests.decorators.flows.plans import make_plan
from tests.decorators.profile.states import make_state

GIB = 2**30


def result(micro_batch_size: int, **changes: object) -> TrialResult:
    plan = make_plan({}, "kubernetes")
    layout = replace(plan.layout, micro_batch_size=micro_batch_size)
    peaks = RankMeasured(
        rank=0, device="cuda:0", allocated_peak_bytes=GIB, reserved_peak_bytes=33 * GIB, rss_peak_bytes=GIB
    )
    values: dict[str, object] = {
        "plan": replace(plan, layout=layout),
        "steps": 10,
        "tokens_per_second": 21000.0,
        "ranks": (peaks,),
    }
    return TrialResult(**(values | changes))  # type: ignore[arg-type]


def test_each_measured_plan_is_shown_with_its_prediction_and_the_selected_one_is_marked() -> None:
    results, failed = result(1), result(4, failure="rank 0 failed", out_of_memory=True, ranks=())
    rows = trial_rows([results, failed], results.plan)
    assert rows[0][0].endswith("(selected)")
    assert rows[0][1:] == ("24,000 tokens/s, 33.0 GiB reserved", "21,000 tokens/s, 33.0 GiB reserved")
    assert rows[1][2] == "ran out of memory"
    assert "taken" not in rows[1][0]


def test_a_card_has_the_table_of_plans_only_after_a_trial() -> None:
    state = make_state()
    without, with_trials = draw(state), draw(replace(state, trials=(result(1),)))
    assert len(with_trials) == len(without) + 2
