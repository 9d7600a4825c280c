"""Sixty plans beside what practitioners do: each difference has its reason, and the page is current."""

from __future__ import annotations

from functools import cache

import pytest

from benchmarks import choices
from benchmarks.choices import Choice

pytestmark = pytest.mark.slow


@cache
def made() -> list[Choice]:
    return choices.choices()


def test_a_plan_with_other_gpus_than_its_source_has_a_reason() -> None:
    assert len(made()) >= 60
    for choice in made():
        assert choice.says
        assert choice.source
        if choice.differs:
            where = f"{choice.model} {choice.method} {choice.options}"
            assert choice.difference, f"{where}: {choice.machine}, and {choice.says}"


def test_the_committed_page_matches_the_planner() -> None:
    renew = "renew it: python -m benchmarks.choices"
    assert choices.RESULTS.read_text(encoding="utf-8") == choices.page(made()), renew
