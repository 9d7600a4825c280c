"""The table of nightly runs: formatting, and the case of a replaced machine."""

from __future__ import annotations

from benchmarks.nights import CASES, REPLACED, findings_by_line, letters, nights, spans


def test_consecutive_nights_are_formatted_as_spans() -> None:
    assert spans([3, 5, 6, 7, 9]) == "3, 5 to 7, 9"


def test_a_failure_of_a_replaced_machine_stays_open_and_the_new_machine_passes() -> None:
    results = nights(CASES["a slow node on nights 8 to 11, replaced on 12"])
    assert letters(results) == "P" * 8 + "F" * 4 + "P" * (30 - REPLACED)
    open_ones = [one for one in findings_by_line(results) if one["line"].startswith("still open")]
    assert [one["nights"][-1] for one in open_ones] == [29]
    assert "host-2" in open_ones[0]["line"]
    assert "host-new" in results[-1].healthy_nodes
