"""Sixty plans compared with published setups: each difference has a reason, and the page is current."""

from __future__ import annotations

from functools import cache

import pytest

from benchmarks import choices
from benchmarks.choices import Choice

pytestmark = pytest.mark.slow


@cache
def all_choices() -> list[Choice]:
    return choices.choices()


def test_a_plan_with_other_gpus_than_its_source_has_a_reason() -> None:
    assert len(all_choices()) >= 60
    for choice in all_choices():
        assert choice.says
        assert choice.source
        if choice.differs:
            choice_name = f"{choice.model} {choice.method} {choice.options}"
            assert choice.difference, f"{choice_name}: {choice.machine}, and {choice.says}"


def test_the_committed_page_matches_the_planner() -> None:
    renew = "renew it: python -m benchmarks.choices"
    assert choices.RESULTS.read_text(encoding="utf-8") == choices.page(all_choices()), renew
