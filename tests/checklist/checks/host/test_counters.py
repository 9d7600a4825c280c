from typing import Any

import pytest

from checklist.checks.host.counters import OF_CPU, growth

PLAIN = ("tcp_segments", "tcp_retransmitted", "carrier_changes", *OF_CPU)


def reading(plain: int | None, errors: dict[str, int] | None) -> dict[str, Any]:
    return dict.fromkeys(PLAIN, plain) | dict.fromkeys(("rdma_errors", "port_errors"), errors)


@pytest.mark.parametrize(
    ("before", "after", "plain", "errors"),
    [
        (reading(3, {"a": 1, "b": 2}), reading(5, {"a": 4, "b": 2}), 2, {"a": 3}),
        (reading(5, {"a": 4}), reading(3, {"a": 1, "new": 7}), 0, {}),
        (reading(None, None), reading(5, {"a": 4}), None, None),
        (reading(5, {"a": 4}), reading(None, None), None, None),
    ],
    ids=["grown", "started again", "no first reading", "no second reading"],
)
def test_counter_growth_is_known_only_between_two_readings(
    before: dict[str, Any], after: dict[str, Any], plain: int | None, errors: dict[str, int] | None
) -> None:
    grown = growth(before, after)
    assert {grown[name] for name in PLAIN} == {plain}
    assert grown["rdma_errors"] == grown["port_errors"] == errors
