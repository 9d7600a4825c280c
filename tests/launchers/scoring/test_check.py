"""Checks of scoring functions before a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from estimator.errors import UserError
from launchers.scoring.check import check_function

FUNCTIONS = """
import sys
import numpy
def length(prompt, answer): return len(answer)
def array(prompt, answer): return numpy.float32(0.5)
def nan(prompt, answer): return float("nan")
def raising(prompt, answer): raise KeyError("no such\\nthing")
def words(prompt, answer): return "good"
def one(answer): return 1.0
def ending(prompt, answer): sys.exit(3)
def picky(prompt, answer): return 1.0 / len(answer)
constant = 3
"""


@pytest.fixture
def functions(tmp_path: Path) -> Path:
    path = tmp_path / "functions.py"
    path.write_text(FUNCTIONS)
    return path


@pytest.mark.parametrize("name", ["length", "array"])
def test_a_function_that_returns_a_number_is_accepted(functions: Path, name: str) -> None:
    check_function(f"{functions}:{name}")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("nan", "returned nan"),
        ("raising", "raised KeyError: 'no such\\nthing'"),
        ("words", "returned 'good', which is not a number"),
        ("one", "raised TypeError"),
        ("ending", "has ended its process"),
        ("constant", "there is no function constant"),
        ("missing", "there is no function missing"),
    ],
)
def test_an_unusable_scoring_function_is_refused_in_one_line(
    functions: Path, name: str, expected: str
) -> None:
    with pytest.raises(UserError) as raised:
        check_function(f"{functions}:{name}")
    assert expected in raised.value.problem
    assert "\n" not in raised.value.problem
