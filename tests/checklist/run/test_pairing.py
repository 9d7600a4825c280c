"""What is made of what two nodes tell of the bytes between them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest

from checklist.run.pairing import pairs
from tests.checklist.run.sessions import Answered


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -1.0, 0.0])
def test_a_sender_whose_seconds_can_not_be_is_noted_and_makes_no_pair(seconds: float) -> None:
    def answer(what: str, rank: int, told: Mapping[str, Any]) -> Any:
        if what == "listen":
            return 4000
        odd = (rank, told["address"]) == (2, "10.0.0.1")
        return {"seconds": [0.1, seconds] if odd else [0.1] * 5, "bytes": 10**9, "error": None}

    run = Answered(4, answer)
    assert pairs(run) is None
    assert {(one.check, one.rank, one.node, one.dst) for one in run.got.unsound} == {("pairs", 2, 2, 0)}
    measured = {(pair.src, pair.dst) for pair in run.got.pairs}
    assert len(measured) == 11
    assert (2, 0) not in measured
    assert not any(pair.alone for pair in run.got.pairs), "nobody is suspected by it"
