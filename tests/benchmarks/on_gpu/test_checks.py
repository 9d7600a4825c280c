"""The checklist run of a benchmark session: its result, or the reason why there is none."""

from __future__ import annotations

from pathlib import Path

from benchmarks.on_gpu import checks


def test_a_checklist_that_exceeds_its_time_limit_is_ended_and_reported(tmp_path: Path) -> None:
    checked = checks.check("cpu", 0, tmp_path, 0.2)
    assert checked.answer is None
    assert (checked.problem, checked.versions) == ("it had not ended after 0 s", {})


def test_a_checklist_that_cannot_run_reports_its_reason(tmp_path: Path) -> None:
    checked = checks.check("cuda", 2, tmp_path, 120)
    assert checked.answer is None
    assert "There is no GPU on this machine" in checked.problem
