"""What runs have cost, added up."""

from __future__ import annotations

from datetime import datetime, timezone

import pytest

from estimator.costs import RunCost, Span, add_up, parse_since, total
from estimator.errors import UserError

NOW = datetime(2026, 11, 24, 12, tzinfo=timezone.utc)


def used(hours: float | None, usd: float | None = 10.0, *, failed: bool = False) -> Span:
    return Span(hours=hours, failed=failed, usd_per_hour=usd)


def cost(user: str, *spans: Span, team: str = "-", model: str = "llama-8b") -> RunCost:
    return RunCost(run=f"{user}/1", user=user, team=team, model=model, spans=spans)


def test_failed_attempts_are_counted_and_unpriced_hours_are_reported_separately() -> None:
    costs = [
        cost("ada", used(2.0), used(1.0, failed=True), used(None)),
        cost("ada", used(4.0, None)),
        cost("bob", used(3.0, None), team="vision"),
    ]
    ada, bob = add_up(costs, "user")
    assert (ada.name, ada.runs, ada.hours, ada.failed_hours) == ("ada", 2, 7.0, 1.0)
    assert (ada.usd, ada.unpriced_hours, ada.unfinished) == (30.0, 4.0, 1)
    assert (bob.usd, bob.unpriced_hours) == (None, 3.0)
    everybody = total("all", costs)
    assert (everybody.runs, everybody.hours, everybody.usd) == (3, 10.0, 30.0)
    assert [each.name for each in add_up(costs, "team")] == ["-", "vision"]
    assert [each.runs for each in add_up(costs, "model")] == [3]
    assert total("all", []).usd is None


@pytest.mark.parametrize(
    ("since", "begin"),
    [
        ("12h", datetime(2026, 11, 24, tzinfo=timezone.utc)),
        ("2w", datetime(2026, 11, 10, 12, tzinfo=timezone.utc)),
        ("30d", datetime(2026, 10, 25, 12, tzinfo=timezone.utc)),
        ("2026-11-01", datetime(2026, 11, 1, tzinfo=timezone.utc)),
    ],
)
def test_since_accepts_a_duration_before_now_or_a_date(since: str, begin: datetime) -> None:
    assert parse_since(since, NOW) == begin


@pytest.mark.parametrize("since", ["yesterday", "30", "-1d", "2026-13-01", f"{10**9}w"])
def test_an_invalid_since_is_refused_with_both_forms(since: str) -> None:
    with pytest.raises(UserError, match="neither a duration nor a date"):
        parse_since(since, NOW)
