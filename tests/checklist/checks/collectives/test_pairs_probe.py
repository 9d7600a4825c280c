"""Summary of the message times between two nodes."""

from __future__ import annotations

import pytest

from checklist.checks.collectives.pairs_probe import summary


def test_a_pair_reports_its_slowest_messages_next_to_its_best_rate() -> None:
    best, slow = summary([0.1] * 17 + [1.0] * 3, 10**8)
    assert (best, slow) == pytest.approx((1.0, 0.1))
