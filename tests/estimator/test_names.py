"""Suggestions for names that do not exist."""

from __future__ import annotations

import pytest

from estimator.names import close_matches, did_you_mean

GPUS = {"h100sxm": "H100 SXM", "h100pcie": "H100 PCIe", "h100": "H100 SXM", "l40s": "L40S"}


@pytest.mark.parametrize(
    ("name", "known", "suggestion"),
    [
        ("quik", ["quick", "night"], "Did you mean quick?"),
        ("QUIK", ["Quick", "night"], "Did you mean Quick?"),
        ("p5", ["p5.48xlarge", "p5e.48xlarge"], "Did you mean p5.48xlarge, p5e.48xlarge?"),
        ("", ["quick"], ""),
        ("zzz", ["quick"], ""),
    ],
)
def test_similar_names_are_suggested_once_each(name: str, known: list[str], suggestion: str) -> None:
    assert did_you_mean(name, known) == suggestion


def test_a_suggestion_can_show_another_spelling_of_the_name() -> None:
    assert did_you_mean("h10", GPUS, shown=GPUS) == "Did you mean H100 SXM, H100 PCIe?"


def test_close_matches_keep_their_spelling_and_accept_a_cutoff() -> None:
    assert close_matches("inputs", ["Input", "inout"]) == ["Input", "inout"]
    assert close_matches("inputs", ["Input", "inout"], cutoff=0.85) == ["Input"]
