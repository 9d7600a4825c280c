"""A live card where other processes want the core, too."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.card_under_load import measure


@pytest.mark.slow
@pytest.mark.nightly  # two processes that never pause would hold up the tests beside them
def test_a_loaded_core_neither_freezes_the_card_nor_holds_the_step_up(tmp_path: Path) -> None:
    measured = measure(tmp_path, seconds=16, others=2)
    assert measured.pages >= 2
    assert measured.longest_without_page_seconds < 30
    assert measured.ended_after_seconds < 10
